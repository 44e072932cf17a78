"""An extension in a package of its own: clients of a counting service find their routes and words here."""

from carpool.extension import USE, Extension, HttpRoute, Routes, Verb

EXTENSION = Extension(
    name="counting",
    home="carpool_counting",
    verbs={"count": Verb("command:Count", USE, "Count the words of a text.")},
    routes=(
        Routes(
            table=(
                HttpRoute("GET", "/counting/models", "front:start_models", api="metadata"),
                HttpRoute("POST", "/counting/words", "front:start_words"),
            ),
            prefix="/counting/",
            words="front:words",
            key_of="front:key_of",
            key_in="front:key_in",
        ),
    ),
)
