"""Prompted models: one session encodes a picture once, another answers each prompt from what is stored."""

from carpool.extension import BackendKind, Columns, Extension, HttpRoute, Routes

EXTENSION = Extension(
    name="prompts_sketch",
    home="carpool_prompts",
    owns=("parts",),
    settings="settings:PART",
    kinds=(BackendKind(name="prompted", home="carpool_prompts.engine", needs_file=False),),
    serving="engine:SERVING",
    engine="engine:engine",
    routes=(
        Routes(
            table=(
                HttpRoute("POST", "/prompts/segment", "front:start_segment"),
                HttpRoute("DELETE", "/prompts/images/{handle}", "front:start_forget", changes=True),
            ),
            prefix="/prompts/",
            words="front:words",
        ),
    ),
    meets={"cache": "{key} does not go with [parts]: the store of a prompted model is its own"},
    columns=(Columns("embeddings", words=("stored", "found", "gone")),),
    metrics="carpool_embeddings_total counter some result:embeddings Prompts, by where their picture was.",
)
