"""Follows objects from frame to frame: a box has the number of the one that it overlaps most in the last
frames of its camera, or a new number."""

from collections import OrderedDict

import numpy as np

CAMERAS = 64  # as many as the settings let in: if there are more, the one that was silent longest has ended
OVERLAP = 0.3  # of two boxes, over their union: less is another object
PATIENCE = 5  # frames in which an object may be hidden


class Camera:
    def __init__(self):
        self.boxes = np.zeros((0, 4), np.float32)
        self.numbers = np.zeros(0, np.int64)
        self.hidden = np.zeros(0, np.int64)
        self.seen = 0

    def follow(self, boxes):
        found = np.zeros(len(boxes), np.int64)
        likeness = overlaps(boxes, self.boxes)
        while likeness.size and likeness.max() >= OVERLAP:
            box, track = np.unravel_index(likeness.argmax(), likeness.shape)
            found[box] = self.numbers[track]
            likeness[box], likeness[:, track] = 0, 0
        for box in np.flatnonzero(found == 0):
            self.seen += 1
            found[box] = self.seen
        lost = ~np.isin(self.numbers, found) & (self.hidden < PATIENCE)
        self.boxes = np.concatenate([boxes, self.boxes[lost]])
        self.numbers = np.concatenate([found, self.numbers[lost]])
        self.hidden = np.concatenate([np.zeros(len(boxes), np.int64), self.hidden[lost] + 1])
        return found


class Model:
    def __init__(self):
        self.cameras = OrderedDict()

    def predict(self, boxes, start, camera):
        tracks = np.zeros(boxes.shape[:2], np.int64)
        for row, (found, begins, name) in enumerate(zip(boxes, start[:, 0], camera[:, 0], strict=True)):
            if begins or name not in self.cameras:
                self.cameras[name] = Camera()
            self.cameras.move_to_end(name)
            if len(self.cameras) > CAMERAS:
                self.cameras.popitem(last=False)
            there = found[:, 4] > 0
            tracks[row, there] = self.cameras[name].follow(found[there, :4])
        return {"tracks": tracks}


def overlaps(some, others):
    """Of each with each: the part of their union that both cover."""
    low = np.maximum(some[:, None, :2], others[None, :, :2])
    high = np.minimum(some[:, None, 2:], others[None, :, 2:])
    both = np.prod(np.maximum(high - low, 0), axis=2)
    area = np.prod(some[:, 2:] - some[:, :2], axis=1)[:, None] + np.prod(
        others[:, 2:] - others[:, :2], axis=1
    )
    return both / np.maximum(area - both, 1e-9)
