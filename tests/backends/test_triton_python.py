"""Models that were written for Triton's Python backend, in their process."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.cases import Specs, python_file, settings
from carpool import backends
from carpool.backends.backend import AnswersEach, Backend, Placement
from carpool.backends.python.declarations import callees
from carpool.config.model import Mode, ModelConfig, TensorConfig
from carpool.config.repository import ModelVersion
from carpool.errors import (
    Cancelled,
    CarpoolError,
    ConfigError,
    InvalidInput,
    ModelError,
    NotFound,
    Unavailable,
    Unsupported,
)
from carpool.types import Array

Opened = Callable[[Backend], Backend]

PAIR: Specs = (("INPUT0", "FP32", (4,)), ("INPUT1", "FP32", (4,)))
SUMS: Specs = (("OUTPUT0", "FP32", (4,)), ("OUTPUT1", "FP32", (4,)))
X: Specs = (("x", "FP32", (3,)),)
Y: Specs = (("y", "FP32", (3,)),)
HEAD = "import json, sys, threading\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n"

ADD_SUB = """
    class TritonPythonModel:
        def initialize(self, args):
            config = json.loads(args["model_config"])
            outputs = [pb_utils.get_output_config_by_name(config, name) for name in ("OUTPUT0", "OUTPUT1")]
            self.kinds = [pb_utils.triton_string_to_numpy(output["data_type"]) for output in outputs]

        def execute(self, requests):
            responses = []
            for request in requests:
                left = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
                right = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
                found = [
                    pb_utils.Tensor("OUTPUT0", (left + right).astype(self.kinds[0])),
                    pb_utils.Tensor("OUTPUT1", (left - right).astype(self.kinds[1])),
                ]
                responses.append(pb_utils.InferenceResponse(output_tensors=found))
            return responses
"""


@pytest.fixture
def tritons(opened: Opened, tmp_path: Path) -> Callable[..., Backend]:
    """Loads such a model from its source."""

    def start(source: str, inputs: Specs = X, outputs: Specs = Y, max_batch: int | None = None) -> Backend:
        file = python_file(tmp_path, HEAD + textwrap.dedent(source))
        config = replace(settings("python", file, inputs, outputs), max_batch=max_batch)
        version = ModelVersion(3, file)
        return opened(backends.load(backends.describe(config, version), version, Placement(2, threads=1)))

    return start


def execute(body: str) -> str:
    """A model whose `execute` has this body."""
    return "class TritonPythonModel:\n  def execute(self, requests):\n" + textwrap.indent(
        textwrap.dedent(body), "    "
    )


def each(backend: Backend, *given: Array, wanted: Sequence[str] = ("y",)) -> list[object]:
    assert isinstance(backend, AnswersEach)
    answers = backend.run_each([({"x": array}, wanted) for array in given])
    return [one if isinstance(one, CarpoolError) else one["y"].tolist() for one in answers]


def rows(*values: float) -> Array:
    return np.array([[value] * 3 for value in values], np.float32)


ANSWER = """
    def answered(array):
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", array)])
"""


def test_a_sum_and_a_difference(tritons: Callable[..., Backend]) -> None:
    backend = tritons(ADD_SUB, PAIR, SUMS)
    left, right = np.arange(8, dtype=np.float32).reshape(2, 4), np.ones((2, 4), np.float32)
    answer = backend.run({"INPUT0": left, "INPUT1": right}, [])
    np.testing.assert_array_equal(answer["OUTPUT0"], left + right)
    np.testing.assert_array_equal(answer["OUTPUT1"], left - right)


def test_requests_stay_apart_and_one_that_fails_harms_no_other(tritons: Callable[..., Backend]) -> None:
    backend = tritons(
        textwrap.dedent(ANSWER)
        + execute("""
            responses = []
            for request in requests:
                x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
                if x[0, 0] < 0:
                    error = pb_utils.TritonError("below zero", pb_utils.TritonError.INVALID_ARG)
                    responses.append(pb_utils.InferenceResponse(error=error))
                else:
                    responses.append(answered(x * len(requests)))
            return responses
        """)
    )
    first, second, third = each(backend, rows(1, 2), rows(-1), rows(3))
    assert (first, third) == ([[3] * 3, [6] * 3], [[9] * 3])
    assert isinstance(second, InvalidInput)
    assert second.message == "below zero"


CODES: dict[str, type] = {
    "UNKNOWN": ModelError,
    "INTERNAL": ModelError,
    "NOT_FOUND": NotFound,
    "INVALID_ARG": InvalidInput,
    "UNAVAILABLE": Unavailable,
    "UNSUPPORTED": Unsupported,
    "ALREADY_EXISTS": InvalidInput,
    "CANCELLED": Cancelled,
}


def test_the_code_of_an_error_says_what_clients_get(tritons: Callable[..., Backend]) -> None:
    body = f"""
        code = {[*CODES]}[int(requests[0].inputs()[0].as_numpy()[0, 0])]
        error = pb_utils.TritonError("no", getattr(pb_utils.TritonError, code))
        return [pb_utils.InferenceResponse(output_tensors=[], error=error) for request in requests]
    """
    backend = tritons(execute(body))
    for number, (code, kind) in enumerate(CODES.items()):
        (error,) = each(backend, rows(number))
        assert (type(error), str(error)) == (kind, "no"), code
        with pytest.raises(ModelError, match="model: no"):
            backend.run({"x": rows(number)}, ["y"])


def test_a_request_brings_its_id_and_parameters(tritons: Callable[..., Backend]) -> None:
    told = execute(
        """
        def answer(request):
            parameters = json.loads(request.parameters())
            said = [len(request.request_id()), request.correlation_id(), request.flags()]
            if "k" in parameters:
                assert parameters == {"k": 2, "id": "own"} and request.timeout() == 2000
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([said], np.float32))])
        return [answer(request) for request in requests]
        """
    )
    backend = tritons(told)
    assert isinstance(backend, AnswersEach)
    details = (
        b'{"id":"seven","parameters":{"k":2,"id":"own","sequence_id":5,"sequence_start":true,'
        b'"sequence_end":true,"timeout":2000,"priority":1,"source":"camera"}}'
    )
    asked = [({"x": rows(1)}, ("y",))] * 2
    first, second = backend.run_each(asked, [details, b""])
    assert not isinstance(first, CarpoolError)
    assert not isinstance(second, CarpoolError)
    assert first["y"].tolist() == [[5, 5, 3]]
    assert second["y"].tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(
    ("parameters", "code", "found"),
    [
        ({}, 'r = pb_utils.InferenceRequest(model_name="b", inputs=[])\nq = f(model_name=name)', ("b",)),
        ({"calls": "c, d"}, 'pb_utils.InferenceRequest(model_name="b")', ("c", "d")),
        ({}, "x = 1", ()),
    ],
)
def test_the_models_that_one_asks_are_known_before_it_runs(
    tmp_path: Path, parameters: dict[str, str], code: str, found: tuple[str, ...]
) -> None:
    file = python_file(tmp_path, code)
    config = replace(settings("python", file, X, Y), parameters=parameters)
    assert callees(config, file)[0] == found


def test_initialize_is_told_everything_as_text(tritons: Callable[..., Backend], tmp_path: Path) -> None:
    source = """
        class TritonPythonModel:
            def initialize(self, args):
                assert all(type(value) is str for value in args.values())
                config = json.loads(args.pop("model_config"))
                x = pb_utils.get_input_config_by_name(config, "x")
                assert pb_utils.get_input_config_by_name(config, "z") is None
                assert not pb_utils.using_decoupled_model_transaction_policy(config)
                self.told = [args[key] for key in sorted(args)]
                self.told += [config["name"], x["data_type"], x["dims"], config["max_batch_size"]]
            def execute(self, requests):
                text = np.array([[json.dumps(self.told)]], dtype=object)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", text)])]
    """
    backend = tritons(source, X, (("y", "BYTES", (1,)),), 4)
    (told,) = backend.run({"x": rows(1)}, ["y"])["y"][0]
    assert told.decode() == (
        f'["0", "CPU", "model_2", "model", "{tmp_path}", "3", "model", "TYPE_FP32", [3], 4]'
    )


def test_what_a_model_keeps_is_not_written_over(tritons: Callable[..., Backend]) -> None:
    source = (
        ANSWER
        + """
    class TritonPythonModel:
        def initialize(self, args):
            self.last = np.zeros((1, 3), np.float32)
        def execute(self, requests):
            (request,) = requests
            before, self.last = self.last, request.inputs()[0].as_numpy()
            return [answered(before)]
    """
    )
    backend = tritons(source)
    assert [each(backend, rows(value))[0] for value in (1, 2, 3)] == [[[0] * 3], [[1] * 3], [[2] * 3]]


def test_tensors_pass_through_dlpack(tritons: Callable[..., Backend]) -> None:
    backend = tritons(
        execute("""
            tensor = requests[0].inputs()[0]
            assert tensor.is_cpu() and tensor.shape() == [1, 3]
            assert tensor.triton_dtype() == pb_utils.numpy_to_triton_type(np.float32) == 11
            seen = np.from_dlpack(tensor) + 1
            capsule = pb_utils.Tensor("inner", seen).to_dlpack()
            again = pb_utils.Tensor.from_dlpack("y", capsule)
            more = pb_utils.Tensor.from_dlpack("y", again.as_numpy() * 2)
            return [pb_utils.InferenceResponse([more])]
        """)
    )
    assert each(backend, rows(4)) == [[[10] * 3]]


def test_an_input_that_was_left_out_is_none(tritons: Callable[..., Backend], tmp_path: Path) -> None:
    body = """
        given = pb_utils.get_input_tensor_by_name(requests[0], "mask")
        y = np.full((1, 3), given is None, np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])]
    """
    backend = tritons(execute(body), (*X, ("mask", "FP32", (3,))))
    assert backend.run({"x": rows(1)}, ["y"])["y"].tolist() == [[1] * 3]
    assert backend.run({"x": rows(1), "mask": rows(1)}, ["y"])["y"].tolist() == [[0] * 3]


def test_execute_may_be_a_coroutine(tritons: Callable[..., Backend]) -> None:
    source = (
        ANSWER
        + """
    import asyncio
    async def twice(request):
        await asyncio.sleep(0)
        return answered(request.inputs()[0].as_numpy() * 2)
    class TritonPythonModel:
        async def execute(self, requests):
            return await asyncio.gather(*map(twice, requests))
    """
    )
    backend = tritons(source)
    for value in (1, 2):
        assert each(backend, rows(value), rows(5)) == [[[2 * value] * 3], [[10] * 3]]


def test_a_sender_answers_once_and_later(tritons: Callable[..., Backend]) -> None:
    source = (
        ANSWER
        + """
    def later(sender, array):
        sender.send(answered(array))
        try:
            sender.send(answered(array))
        except pb_utils.TritonModelException as error:
            print(error)
        else:
            sys.exit("answered twice")
    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                arguments = request.get_response_sender(), request.inputs()[0].as_numpy() + 1
                threading.Thread(target=later, args=arguments).start()
    """
    )
    assert each(tritons(source), rows(1), rows(2)) == [[[2] * 3], [[3] * 3]]


MISTAKES = (
    ("return []", r"must return a list of 1 responses, not 0"),
    ("return 5", r"must return a list of 1 responses, not a int"),
    ("return None", r"returned a NoneType in place of an InferenceResponse"),
    ("return ['text']", r"returned a str in place of an InferenceResponse"),
    (
        "raise pb_utils.TritonModelException('tired')",
        r"TritonModelException: tired \(model\.py:\d+, in exec",
    ),
    ("return [pb_utils.InferenceResponse([1])]", r"must be a list of Tensor"),
    (
        "return [pb_utils.InferenceResponse([pb_utils.Tensor('y', 1)])]",
        r"must be a numpy array, not a int",
    ),
    (
        "pb_utils.MetricFamily",
        r"no MetricFamily in the triton_python_backend_utils of Carpool: docs/coming",
    ),
    ("requests[0].get_response_sender().send(flags=1); return", r"ended without a response"),
    ("requests[0].set_release_flags(2)", r"cannot be put back into the queue"),
    (
        "pb_utils.InferenceRequest(model_name='other').exec()",
        r"other models cannot be called",
    ),
    (
        "pb_utils.InferenceRequest(model_name='other').exec(decoupled=True)",
        r"other models can only be called for exactly one response here",
    ),
)


def test_a_mistake_is_named_and_the_model_goes_on(tritons: Callable[..., Backend]) -> None:
    """Number `n` is made by the request for -n."""
    tried = "\n".join(
        f"if asked == {-number}:\n    {body}" for number, (body, _) in enumerate(MISTAKES, start=1)
    )
    backend = tritons(
        execute(f"asked = requests[0].inputs()[0].as_numpy()[0, 0]\n{tried}\nreturn good(requests)")
        + "\n\ndef good(requests):\n"
        + "    return [pb_utils.InferenceResponse([pb_utils.Tensor('y', np.zeros((1, 3), 'f'))])]"
    )
    for number, (_, cause) in enumerate(MISTAKES, start=1):
        with pytest.raises(ModelError, match=cause):
            backend.run({"x": rows(-number)}, ["y"])
        assert backend.alive
        assert each(backend, rows(1)) == [[[0] * 3]]


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("class TritonPythonModel: pass", r"TritonPythonModel has no method execute"),
        ("if False:\n    class TritonPythonModel: pass", r"it has no class TritonPythonModel"),
        (
            "class TritonPythonModel:\n    def initialize(self, args): raise ValueError('no weights')",
            r"ValueError: no weights|no method execute",
        ),
    ],
)
def test_what_cannot_be_loaded_says_why(tritons: Callable[..., Backend], source: str, cause: str) -> None:
    with pytest.raises(ModelError, match=f"model.py cannot be loaded: .*({cause})"):
        tritons(source)


def test_finalize_is_called_when_the_instance_is_closed(
    tritons: Callable[..., Backend], tmp_path: Path
) -> None:
    source = f"""
        class TritonPythonModel:
            def execute(self, requests): ...
            def finalize(self):
                open({str(tmp_path / "ended")!r}, "w").close()
    """
    backend = tritons(source)
    assert not (tmp_path / "ended").exists()
    backend.close()
    assert (tmp_path / "ended").exists()


def test_reshaped_tensors_are_reshaped_for_each_request(opened: Opened, tmp_path: Path) -> None:
    source = (
        HEAD
        + textwrap.dedent(ANSWER)
        + execute("""
        assert all(request.inputs()[0].shape()[1:] == [1, 3] for request in requests)
        return [answered(request.inputs()[0].as_numpy()) for request in requests]
    """)
    )
    file = python_file(tmp_path, source)
    tensors = [TensorConfig(name, "FP32", (3,), reshape=(1, 3)) for name in "xy"]
    config = replace(settings("python", file), inputs=(tensors[0],), outputs=(tensors[1],))
    version = ModelVersion(1, file)
    backend = opened(backends.load(backends.describe(config, version), version))
    assert each(backend, rows(1), rows(2, 3)) == [[[1] * 3], [[2] * 3, [3] * 3]]


# ---- auto_complete_config

COMPLETES = """
    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            known = [tensor["name"] for tensor in config.as_dict()["input"]]
            for name in ("a", "b"):
                if name not in known:
                    config.add_input({"name": name, "data_type": "TYPE_FP32", "dims": [4]})
            config.add_output({"name": "c", "data_type": "TYPE_STRING", "dims": [-1]})
            MORE
            return config
        def execute(self, requests): ...
"""


def completed(tmp_path: Path, more: str, config: ModelConfig | None = None) -> ModelConfig:
    file = python_file(tmp_path, textwrap.dedent(COMPLETES).replace("MORE", more))
    return backends.describe(config or settings("python", file), ModelVersion(1, file))


def test_a_model_completes_its_settings(tmp_path: Path) -> None:
    config = completed(tmp_path, "config.set_max_batch_size(4); config.set_dynamic_batching()")
    assert config.inputs == (TensorConfig("a", "FP32", (4,)), TensorConfig("b", "FP32", (4,)))
    assert config.outputs == (TensorConfig("c", "BYTES", (-1,)),)
    assert (config.max_batch, config.mode) == (4, Mode.FIXED)


def test_a_model_may_do_without_a_batch(tmp_path: Path) -> None:
    config = completed(tmp_path, "config.set_max_batch_size(0)")
    assert (config.max_batch, config.mode) == (0, Mode.EAGER)


def test_what_somebody_wrote_stays(tmp_path: Path) -> None:
    written = TensorConfig("b", "FP32", (4,), optional=True)
    config = replace(settings("python", tmp_path / "model.py"), inputs=(written,), max_batch=2)
    found = completed(tmp_path, "config.set_max_batch_size(8)", config)
    assert found.inputs == (written, TensorConfig("a", "FP32", (4,)))
    assert found.max_batch == 8


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ('config.add_input({"name": "a", "data_type": "TYPE_INT8", "dims": [4]})', "say data_type TYPE_FP32"),
        ('config.add_input({"name": "d", "dims": [4]})', "input 'd' has no 'data_type'"),
        ('config.add_output({"name": "c", "labels": 5})', "has the property 'labels'"),
        ('config.add_input({"name": "d", "data_type": "TYPE_FP31", "dims": [4]})', "data_type"),
        (
            'config.set_model_transaction_policy({"coupled": True})',
            "model_transaction_policy has no 'coupled'",
        ),
        ('config.set_model_transaction_policy({"other": True})', "has no 'other'"),
        ("return None", "must return its argument, not a NoneType"),
        ("config.set_max_batch_size(1 << 20)", "max_batch_size must be 0 to"),
    ],
)
def test_settings_that_cannot_be_completed_say_why(tmp_path: Path, more: str, cause: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=cause):
        completed(tmp_path, more)
