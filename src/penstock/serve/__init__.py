"""The server: OpenAI's interface over HTTP, in front of the engine's queue of requests."""
