"""Routing quality beside NVIDIA Dynamo's selection service: the same simulated fleet, requests and run.

The service (`dynamo.select_service`) only chooses: it hears the fleet's KV events over ZMQ, is asked for a worker
before each request, and is told when its prompt is computed and when it has ended. The request itself goes straight
from the client to the worker. `python -m scripts.bench.selection --help`.
"""
