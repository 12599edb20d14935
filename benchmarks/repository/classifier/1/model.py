import numpy as np
import triton_python_backend_utils as pb_utils

CLASSES = 1000


class TritonPythonModel:
    """Reads each pixel once: the means of the channels, a linear layer, softmax."""

    def initialize(self, args):
        self._weights = np.random.default_rng(7).standard_normal((3, CLASSES)).astype(np.float32)

    def execute(self, requests):
        return [self._classify(request) for request in requests]

    def _classify(self, request):
        images = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        scores = np.exp(images.mean(axis=(2, 3)) @ self._weights)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", scores / scores.sum(axis=1, keepdims=True))])
