"""The API as the router needs to know it: the few fields it reads, its errors, and the answers that workers keep.

OpenAI's, and of Anthropic's the paths and errors that engines offer too. All else of a request passes as bytes.
"""
