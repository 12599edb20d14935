"""The process of one instance of a Python-backend model.

`python -m dynamo.worker.repository.stub.process SOCKET PROGRESS`, two descriptors.

The process ends when the worker does: the socket is closed then.
"""

from __future__ import annotations

import mmap
import signal
import socket
import sys
import threading

from dynamo.worker.repository.stub import pb_utils
from dynamo.worker.repository.stub.loop import Stub
from dynamo.worker.repository.stub.model_process import ModelProcess


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the worker, which lets requests finish
    stub = Stub(socket.socket(fileno=int(sys.argv[1])))
    progress = memoryview(mmap.mmap(int(sys.argv[2]), mmap.PAGESIZE)).cast("Q")
    pb_utils.attach(stub)
    for name in ("triton_python_backend_utils", "c_python_backend_utils"):
        sys.modules[name] = pb_utils
    threading.Thread(target=stub.read_for_main, name="reader", daemon=True).start()
    ModelProcess(stub, progress).run()


if __name__ == "__main__":
    main()
