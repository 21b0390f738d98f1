"""Migration of streams: one request's way over several workers, and counts of how migrations ended.

The rest of the package knows the bytes; this module connects it with workers and their models.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal, get_args

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engines.disaggregation.legs import Body, read_body, value_of
from engines.shaping import tells_tokens
from indexer.types import Namespace
from publishers.logs import log_event
from router.http.relay import Relay
from router.http.upstream import Head
from router.metrics.tallies import counter_family
from router.migration.bodies import continuation, tokens_left, wants_ids, with_ids
from router.migration.record import Ends, Record
from router.migration.refusal import refusal
from router.migration.relay import RecordedEvents
from router.openai.inference import Inference
from router.proxy.legs import Leg
from router.workers.fleet import Fleet
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

Outcome = Literal["continued", "ended", "refused", "failed"]
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
_COMPLETIONS: Final = b"/v1/completions"


class Migrations(Collector):
    """All migrations. `tokenizer`: for the name of a base model, whether tokens end with a whole character; None where
    the router has no tokenizer for it."""

    def __init__(self, limit: int, fleet: Fleet, tokenizer: Callable[[str], Ends | None]) -> None:
        """`limit`: how often one stream may migrate."""
        self.limit = limit
        self.fleet = fleet
        self.tokenizer = tokenizer
        self.outcomes: Counter[str] = Counter()

    def collect(self) -> Iterator[Metric]:
        counts = (((outcome,), self.outcomes[outcome]) for outcome in OUTCOMES)
        text = "Streams that broke off, by whether another worker went on, all was there, or neither could be."
        yield counter_family("router_migrations", text, ("outcome",), counts)


class Migration:
    """One streamed request that may migrate. `failure` and `whole` are about its present worker."""

    __slots__ = ("_all", "_asks", "_body", "_inference", "_record", "_refusal", "_resumed", "_tries")

    def __init__(self, migrations: Migrations, inference: Inference) -> None:
        self._all = migrations
        self._inference = inference
        self._body: Body = {}
        self._refusal: str | None = "its body cannot be read"
        self._record: Record | None = None
        """None: the present worker's part is not recorded."""
        self._asks = False
        """Whether the present worker is asked for token ids."""
        self._resumed = False
        """Whether it continues what another has begun."""
        self._tries = 0
        """How often the stream has migrated, as `--migration-limit` counts it."""
        try:
            self._body = read_body(inference.raw)
        except ValueError:
            return
        self._refusal = refusal(inference.endpoint, self._body)

    def rewrite(self, body: bytes) -> None:
        """The first worker is sent this body instead, with the same prompt."""
        self._body = read_body(body)

    def fill(self, leg: Leg) -> None:
        """Give it the body that its worker is to be sent."""
        self._asks = self._refusal is None and tells_tokens(leg.worker.engine)
        if not self._resumed:
            self._record = None  # nothing of an earlier try was sent
        record = self._record
        if not self._asks:
            return
        if record and self._resumed and record.prompt is not None and record.output:
            body = continuation(self._body, record.prompt, record.output, self._left(record, leg.worker) or 0)
            leg.target = _COMPLETIONS
        else:
            body = with_ids(self._body)
        leg.body = body

    def relay(self, head: Head) -> Relay | None:
        """What relays the answer to the body from `leg`; None: as any other answer."""
        if not self._asks or head.status != 200 or not head.events or head.framing != "chunked":
            return None
        if self._record is None:
            self._record = Record(self._inference.endpoint == "chat", wants_ids(self._body), self._ends)
        return RecordedEvents(self._record)

    @property
    def failure(self) -> str | None:
        """The worker's own report that it failed."""
        return self._record.failure if self._record else None

    @property
    def whole(self) -> bool:
        """Whether the stream may end here."""
        return self._record is None or self._record.done

    def ending(self) -> bytes | None:
        """The final events of a stream that has all its tokens and lacks only those; None while tokens are missing."""
        options = value_of(self._body, "stream_options")
        with_usage = isinstance(options, dict) and options.get("include_usage") is True
        end = self._record.ending(with_usage) if self._record else None
        if end is not None:
            self.count("ended")
        return end

    def cut(self, unbegun: bool) -> bool:
        """The worker has broken off; returns whether another may go on. `unbegun`: it was to continue the stream and
        did not begin, having no room or being unreachable, so this does not count towards the limit."""
        self._tries -= unbegun
        reason = self._reason()
        if reason is None:
            self._tries += 1
            self._resumed = True
            return True
        limited = self._tries >= self._all.limit
        self.count("failed" if limited else "refused")
        log_event(logger, logging.INFO, "A stream cannot go on elsewhere", reason=reason)
        return False

    def _reason(self) -> str | None:
        record = self._record
        if self._tries >= self._all.limit:
            return f"it has gone on as often as --migration-limit lets it, which is {self._all.limit}"
        if self._refusal or record is None:
            return self._refusal or "its engine tells no tokens, or it was served in two parts"
        trouble = record.cut()
        if trouble or not record.output:
            return trouble
        left = self._left(record)
        if left is None:
            return "nobody knows how long its model lets it become"
        return None if left > 0 else "it has all tokens that it may have"

    @property
    def _ends(self) -> Ends | None:
        base = self._all.fleet.base_model(self._inference.model)
        return self._all.tokenizer(base.id) if base else None

    def takes(self, worker: Worker) -> bool:
        """Whether `worker` can continue the stream, and its context has room for the rest."""
        if not tells_tokens(worker.engine):
            return False
        record, tokens = self._record, self.tokens
        if record is None or tokens is None or not record.output:  # it gets the whole request, as the first did
            return True
        left, longest = self._left(record, worker), self._lengths.get(worker.id)
        return left is not None and left > 0 and (longest is None or len(tokens) + left <= longest)

    def _left(self, record: Record, worker: Worker | None = None) -> int | None:
        """How many tokens may follow on `worker`; None: on the worker with the longest context."""
        lengths, prompt = self._lengths, len(record.prompt or ())
        longest = lengths.get(worker.id) if worker else max(lengths.values(), default=None)
        return tokens_left(self._body, self._inference.endpoint, prompt, len(record.output), longest)

    @property
    def _lengths(self) -> Mapping[str, int]:
        """The context length of the request's model, by worker."""
        fleet = self._all.fleet
        base = fleet.base_model(self._inference.model)
        return fleet.context_lengths(base.id).by_worker if base else {}

    @property
    def tokens(self) -> Sequence[int] | None:
        """The prompt for the next worker, with the tokens so far; None while the first worker has not told the prompt's
        tokens."""
        record = self._record
        return record.prompt + record.output if record and record.prompt is not None else None

    @property
    def namespace(self) -> Namespace:
        """The namespace in which those tokens are cached."""
        return self._all.fleet.namespace(self._inference.model, self._inference.cache_salt)

    def count(self, outcome: Outcome) -> None:
        self._all.outcomes[outcome] += 1
