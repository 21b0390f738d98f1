"""Spans of requests, for OpenTelemetry (`--otlp-traces-endpoint`)."""
