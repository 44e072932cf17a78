"""Cameras that a process of its own reads, and that can be added and removed while the server runs."""

from carpool.extension import Columns, Extension, HttpRoute, Process, Routes

EXTENSION = Extension(
    name="cameras_sketch",
    home="carpool_cameras",
    starts=("CAMERAS_FILE",),
    engine="engine:engine",
    processes=(Process("cameras", "process:start"),),
    routes=(
        Routes(
            table=(
                HttpRoute("GET", "/cameras", "front:start_list", api="metadata"),
                HttpRoute("POST", "/cameras", "front:start_add", "control", changes=True),
                HttpRoute("DELETE", "/cameras/{name}", "front:start_remove", "control", changes=True),
            )
        ),
    ),
    columns=(Columns("frames", words=("answered", "replaced", "failed")),),
    metrics="carpool_camera_frames_total counter some result:frames Frames of cameras, by their end.",
)
