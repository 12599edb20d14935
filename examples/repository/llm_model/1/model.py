"""A text model of Triton's Python backend. It knows nothing of the server that runs it."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.greeting = config["parameters"]["greeting"]["string_value"]
        output = pb_utils.get_output_config_by_name(config, "text_output")
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
        pb_utils.Logger.log_info(f"{args['model_instance_name']} is ready")

    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            if any(not text for text in texts.reshape(-1)):
                error = pb_utils.TritonError("a text is empty", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            lines = [f"{self.greeting}: {text.decode()}" for text in texts.reshape(-1)]
            output = pb_utils.Tensor("text_output", np.array(lines, self.dtype).reshape(texts.shape))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses

    def finalize(self):
        pb_utils.Logger.log_info("the text model is gone")
