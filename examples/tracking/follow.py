"""Two objects cross the picture of one camera, and the tracker on http://localhost:8000 numbers them."""

import numpy as np

import carpool

FRAMES = 8

with carpool.Client("http://localhost:8000") as client:
    for n in range(FRAMES):
        boxes = np.zeros((1, 32, 5), np.float32)  # x1, y1, x2, y2, score; those of score 0 are none
        boxes[0, 0] = 10 + 8 * n, 20, 60 + 8 * n, 90, 0.9
        boxes[0, 1] = 300 - 8 * n, 40, 350 - 8 * n, 110, 0.8
        boxes[0, :2] = boxes[0, [n % 2, 1 - n % 2]]  # a detector promises no order
        answer = client.infer(
            "tracker",
            {"boxes": boxes},
            sequence_id="north",
            sequence_start=n == 0,
            sequence_end=n == FRAMES - 1,
        )
        print(f"frame {n}: boxes {boxes[0, :2, 0].astype(int)} show {answer['tracks'][0, :2]}")
