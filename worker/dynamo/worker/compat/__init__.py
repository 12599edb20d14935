"""Runs workers written for NVIDIA Dynamo, unchanged: `python -m dynamo.worker.compat worker.py [ARGUMENTS]`.

Such a worker imports `dynamo.llm` and `dynamo.runtime`. These modules stand in for them in this process only, and only when it
was started this way: nothing here is imported otherwise.
"""
