"""A detector for Frigate that asks a server of the KServe v2 protocol, such as Carpool or Triton.

It is a proposal for upstream, as frigate/detectors/plugins/kserve.py. Frigate decodes the outputs itself:

    detectors: {carpool: {type: kserve, url: "http://carpool.local:8000", model_name: yolo}}
"""

import json
from typing import Literal

import numpy as np
import requests
from frigate.detectors.detection_api import DetectionApi
from frigate.detectors.detector_config import BaseDetectorConfig, ModelTypeEnum
from frigate.util.model import post_process_rfdetr, post_process_yolo, post_process_yolox

DETECTOR_KEY = "kserve"
DTYPES = {"UINT8": np.uint8, "FP16": np.float16, "FP32": np.float32, "INT32": np.int32, "INT64": np.int64}


class KServeConfig(BaseDetectorConfig):
    type: Literal["kserve"]
    url: str = "http://localhost:8000"
    model_name: str
    timeout: float = 1.0


class KServe(DetectionApi):
    type_key = DETECTOR_KEY

    def __init__(self, detector_config: KServeConfig) -> None:
        super().__init__(detector_config)
        self.session, self.timeout = requests.Session(), detector_config.timeout
        self.url = f"{detector_config.url}/v2/models/{detector_config.model_name}"
        self.input = self.session.get(self.url, timeout=30).json()["inputs"][0]
        self.type = detector_config.model.model_type
        if self.type == ModelTypeEnum.yolox:
            self.calculate_grids_strides()

    def detect_raw(self, tensor_input: np.ndarray) -> np.ndarray:
        try:
            outputs = self.infer(np.ascontiguousarray(tensor_input, DTYPES[self.input["datatype"]]))
        except requests.RequestException:  # also a rejection: nothing was found in this frame
            return np.zeros((20, 6), np.float32)
        if self.type == ModelTypeEnum.rfdetr:
            return post_process_rfdetr(outputs)
        if self.type == ModelTypeEnum.yolox:
            return post_process_yolox(outputs[0], self.width, self.height, self.grids, self.expanded_strides)
        return post_process_yolo(outputs, self.width, self.height)

    def infer(self, tensor: np.ndarray) -> list[np.ndarray]:
        size = {"binary_data_size": tensor.nbytes}
        one = {**self.input, "shape": list(tensor.shape), "parameters": size}
        head = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}}).encode()
        fields = {"Inference-Header-Content-Length": str(len(head))}
        body = head + tensor.tobytes()
        answer = self.session.post(f"{self.url}/infer", data=body, headers=fields, timeout=self.timeout)
        answer.raise_for_status()
        at, outputs = int(answer.headers["Inference-Header-Content-Length"]), []
        for one in json.loads(answer.content[:at])["outputs"]:
            end = at + one["parameters"]["binary_data_size"]
            outputs.append(
                np.frombuffer(answer.content[at:end], DTYPES[one["datatype"]]).reshape(one["shape"])
            )
            at = end
        return outputs
