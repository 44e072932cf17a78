"""A client that asks detector and classifier itself: it sends the picture, gets boxes, decodes and cuts, and
sends all crops at once, as a tensor or as JPEGs. One process of several; threads with a connection each."""

import argparse
import http.client
import json
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cv2
import numpy as np
import simplejpeg

from chip.repository import SIDE
from chip.street import FINDER, FOUND

_WAYS = ("tensor", "jpegs")
_BORDER = b"a-border-between-pictures"


class Asks:
    def __init__(self, url: str, network: str, way: str) -> None:
        place = urlsplit(url)
        self._connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=10)
        self._network = network
        self._way = way

    def ask(self, file: bytes) -> bool:
        answer = self._post(f"/models/{FINDER}/predict", file)
        if answer is None:
            return False
        found = json.loads(answer)["detections"][:FOUND]
        pixels = simplejpeg.decode_jpeg(file)
        height, width = pixels.shape[:2]
        crops = []
        for one in found:
            left, top, right, bottom = (round(side) for side in one["box"])
            left, top = max(0, left), max(0, top)
            part = pixels[top : max(top + 1, min(bottom, height)), left : max(left + 1, min(right, width))]
            crops.append(part)
        return self._classify(crops)

    def _classify(self, crops: list[Any]) -> bool:
        if self._way == "tensor":
            small = [cv2.resize(part, (SIDE, SIDE), interpolation=cv2.INTER_AREA) for part in crops]
            tensor = np.ascontiguousarray(np.stack(small).transpose(0, 3, 1, 2)).tobytes()
            head = json.dumps(
                {
                    "inputs": [
                        {
                            "name": "image",
                            "datatype": "UINT8",
                            "shape": [len(crops), 3, SIDE, SIDE],
                            "parameters": {"binary_data_size": len(tensor)},
                        }
                    ],
                    "outputs": [{"name": "logits", "parameters": {"binary_data": True}}],
                }
            ).encode()
            fields = {"Inference-Header-Content-Length": str(len(head))}
            answer = self._post(f"/v2/models/{self._network}/infer", head + tensor, fields)
            if answer is None:
                return False
            scores = np.frombuffer(answer[-4000 * len(crops) :], np.float32).reshape(len(crops), -1)
            return bool(np.argsort(scores, axis=1)[:, -5:].size)
        parts = b"".join(
            b'--%b\r\nContent-Disposition: form-data; name="file"; filename="a.jpg"\r\n\r\n%b\r\n'
            % (_BORDER, simplejpeg.encode_jpeg(np.ascontiguousarray(part), quality=90))
            for part in crops
        )
        fields = {"Content-Type": f"multipart/form-data; boundary={_BORDER.decode()}"}
        body = parts + b"--%b--\r\n" % _BORDER
        answer = self._post(f"/models/{self._network}/predict", body, fields)
        return answer is not None and all("classes" in one for one in json.loads(answer)["results"])

    def _post(self, path: str, body: bytes, fields: dict[str, str] | None = None) -> bytes | None:
        self._connection.request("POST", path, body, fields or {})
        response = self._connection.getresponse()
        answer = response.read()
        return answer if response.status == 200 else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("network")
    parser.add_argument("photos", type=Path, nargs="+")
    parser.add_argument("--way", choices=_WAYS, default="tensor")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warm", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--slo-ms", type=float, default=250.0)
    given = parser.parse_args()
    cv2.setNumThreads(1)
    files = [path.read_bytes() for path in given.photos]
    took: list[float] = []
    failed = [0]
    begin = time.monotonic() + given.warm
    end = begin + given.seconds

    def work(number: int) -> None:
        asks = Asks(given.url, given.network, given.way)
        at = number
        while (started := time.monotonic()) < end:
            good = asks.ask(files[at % len(files)])
            now = time.monotonic()
            if begin <= now <= end:
                if good:
                    took.append(now - started)
                else:
                    failed[0] += 1
            at += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(given.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took.sort()
    good = sum(one * 1e3 <= given.slo_ms for one in took)
    print(
        json.dumps(
            {
                "answered": len(took),
                "good": good,
                "failed": failed[0],
                "p50_ms": round(took[len(took) // 2] * 1e3, 1) if took else None,
                "p99_ms": round(took[int(len(took) * 0.99)] * 1e3, 1) if took else None,
            }
        )
    )


if __name__ == "__main__":
    main()
