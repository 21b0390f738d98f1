"""How prompts become tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from router.settings.options import about


@dataclass(frozen=True, kw_only=True)
class Tokens:
    tokenizer: Annotated[
        str,
        about(
            "Tokens",
            "Where the model's tokenizer is: auto looks in the folder that the engine reports and in the local "
            "Hugging Face cache; engine asks an engine's /tokenize for each prompt; a PATH is a folder with "
            "tokenizer.json; a NAME is downloaded from Hugging Face (nothing else is ever downloaded).",
            "auto|engine|PATH|NAME",
            pattern=r"^\S(.*\S)?\Z",
            takes="auto, engine, a folder with tokenizer.json, or a model's name",
        ),
    ] = "auto"
    send_token_ids: Annotated[
        bool,
        about(
            "Tokens",
            "Send vLLM the prompts of completions and chats as the router's token ids, so that the engine does not "
            "tokenize them again. This needs engines that accept ids (vLLM 0.32 does), for all workers of a model.",
        ),
    ] = False
