"""Models that a library runs as one function of arrays.

| module | holds |
|---|---|
| `onnx_backend` | ONNX models by ONNX Runtime |
| `openvino_backend` | models of OpenVINO |
| `session` | what these backends share |
| `tensorrt_backend` | engines of TensorRT |
| `torch_backend` | PyTorch models: TorchScript, and programs of torch.export |
"""
