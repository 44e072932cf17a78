"""Lists the extensions of this package, and finds those of other packages.

This is the one list in which the server's own code names features. Its order is the order of wrapping, from
the client to the engine; a line gives the reason where the order matters.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

from carpool.extension import (
    CAPACITY,
    CHECK,
    GROUP,
    PREPARE,
    USE,
    BackendKind,
    Columns,
    Extension,
    HttpRoute,
    Routes,
    ServerOption,
    Verb,
)

_REPOSITORY = "model-repository"
_ONE_MODEL = "/v2/models/{model}"
_MODEL = f"{_ONE_MODEL}[/versions/{{version}}]"
_CACHE = Routes(
    table=(
        HttpRoute("GET", f"{_MODEL}/cache", "routes:start_status", api="statistics"),
        HttpRoute(
            "DELETE", f"{_ONE_MODEL}/cache", "routes:start_clear", "control", changes=True, api=_REPOSITORY
        ),
    )
)
_DRIFTING = f"{_MODEL}/drift"
_DRIFT = Routes(
    table=(
        HttpRoute("GET", f"{_MODEL}/drift", "routes:start_status", api="statistics"),
        HttpRoute(
            "POST", f"{_MODEL}/drift", "routes:start_change", "control", changes=True, api="statistics"
        ),
    )
)
_GENERATE = Routes(
    table=(
        HttpRoute("POST", f"{_MODEL}/generate", "generate_routes:start_generate"),
        HttpRoute("POST", f"{_MODEL}/generate_stream", "generate_routes:start_stream"),
    ),
    paths="page:paths",
)
_ROLLOUT = f"{_ONE_MODEL}/rollout"
_DIFFERENT = f"{_ROLLOUT}/disagreements"
_ROLLOUTS = Routes(
    table=(
        HttpRoute("GET", _ROLLOUT, "routes:start_status", api="statistics"),
        HttpRoute("POST", _ROLLOUT, "routes:start_act", "control", changes=True, api=_REPOSITORY),
        HttpRoute("GET", _DIFFERENT, "routes:start_disagreements", "control", api=_REPOSITORY),
        HttpRoute("GET", f"{_DIFFERENT}/{{number}}", "routes:start_picture", "control", api=_REPOSITORY),
        HttpRoute("POST", f"{_ONE_MODEL}/feedback", "routes:start_feedback", changes=True),
    )
)
_TEXT = Routes(
    table=(
        HttpRoute("POST", "/read", "event_routes:start_read", events=True),
        HttpRoute("POST", "/caption", "event_routes:start_caption", events=True),
        HttpRoute("POST", "/models/{model}/predict", "event_routes:start_predict", events=True),
    )
)
_OPENAI = Routes(
    table=(
        HttpRoute("POST", "/v1/chat/completions", "chat_routes:start_chat"),
        HttpRoute("POST", "/v1/responses", "chat_routes:start_response"),
        HttpRoute("GET", "/v1/models", "chat_routes:start_list", api="metadata"),
        HttpRoute("GET", "/v1/models/{model}", "chat_routes:start_one", api="metadata"),
    ),
    prefix="/v1/",
    words="chat_format:as_error",
    paths="page:paths",
)
_TRACE = "/v2[/models/{model}]/trace/setting"
_TRACING = Routes(
    table=(
        HttpRoute("GET", _TRACE, "routes:start_settings", "control", api="trace"),
        HttpRoute("POST", _TRACE, "routes:start_update", "control", changes=True, api="trace"),
    )
)
_PREDICTIONS = "/predictions/{model}[/{version}]"
_TORCHSERVE = Routes(
    table=(
        HttpRoute("POST", _PREDICTIONS, "front:start_prediction"),
        HttpRoute("PUT", _PREDICTIONS, "front:start_prediction"),
        HttpRoute("GET", "/ping", "front:start_ping", kind="health", api="health"),
    ),
    paths="page:paths",
)
_TILES = Routes(
    table=(
        HttpRoute("POST", "/detect", "progress_routes:start_detect", events=True),
        HttpRoute("POST", "/segment", "progress_routes:start_segment", events=True),
        HttpRoute("POST", "/pose", "progress_routes:start_pose", events=True),
    )
)
# ---- protocols of other tools, which are off unless the server's setting `api` names them ----
_ROBOFLOW = Routes(
    table=(
        # For these three the SDK sends no key.
        HttpRoute("GET", "/roboflow/info", "roboflow_routes:start_info", "health", api="metadata"),
        HttpRoute("POST", "/roboflow/model/remove", "roboflow_routes:start_remove", "health", api="metadata"),
        HttpRoute("POST", "/roboflow/model/clear", "roboflow_routes:start_clear", "health", api="metadata"),
        HttpRoute("GET", "/roboflow/model/registry", "roboflow_routes:start_registry", api="metadata"),
        HttpRoute("POST", "/roboflow/model/add", "roboflow_routes:start_add", api="metadata"),
        HttpRoute("POST", "/roboflow/infer/{task}", "roboflow_routes:start_infer"),
        HttpRoute("POST", "/roboflow/clip/{call}", "clip_and_ocr:start_clip"),
        HttpRoute("POST", "/roboflow/{engine}/ocr", "clip_and_ocr:start_ocr"),
        HttpRoute("POST", "/roboflow/ocr/{engine}", "clip_and_ocr:start_ocr"),
        HttpRoute("POST", "/roboflow/workflows/run", "roboflow_routes:start_other"),
        HttpRoute("POST", "/roboflow/{project}/{version}", "roboflow_routes:start_old"),
        HttpRoute("POST", "/roboflow/{workspace}/workflows/{workflow}", "roboflow_routes:start_workflow"),
    ),
    prefix="/roboflow/",
    words="roboflow_format:words",
    key_of="roboflow_routes:key_of",
    key_in="roboflow_routes:key_in",
)
_DOODS = Routes(
    table=(
        HttpRoute("GET", "/doods/detectors", "doods_routes:start_detectors", api="metadata"),
        HttpRoute("POST", "/doods/detect", "doods_routes:start_detect"),
    ),
    prefix="/doods/",
    words="doods_routes:words",
    key_of="doods_routes:key_of",
)
_FRIGATE = Routes(
    table=(
        HttpRoute("POST", "/v1/vision/detection", "deepstack:start_detection"),
        HttpRoute("POST", "/v1/vision/custom/{model}", "deepstack:start_detection"),
    ),
    prefix="/v1/vision/",
    words="deepstack:words",
    key_in="deepstack:key_in",
)
_FRIGATE_VERB = Verb(
    "frigate_command:FrigateVerb", USE, "Answer Frigate's zmq detector with a model of a running server."
)
_MCP = Routes(
    table=(
        HttpRoute("POST", "/mcp", "mcp_routes:start_message"),
        HttpRoute("POST", "/mcp/upload", "mcp_routes:start_upload"),
    ),
    prefix="/mcp",
    words="mcp_messages:words",
)
_EMBEDDINGS = Routes(
    table=(
        HttpRoute("POST", "/v1/embeddings", "embedding_routes:start_embeddings"),
        HttpRoute("GET", "/v1/models", "embedding_routes:start_list", api="metadata"),
        HttpRoute("GET", "/v1/models/{model}", "embedding_routes:start_one", api="metadata"),
    ),
    words="embedding_routes:words",
)
_LABEL_STUDIO_AT = "/label-studio[/{model}]"
_LABEL_STUDIO = Routes(
    table=(
        HttpRoute("GET", f"{_LABEL_STUDIO_AT}/health", "label_routes:start_health", "health", api="health"),
        HttpRoute("POST", f"{_LABEL_STUDIO_AT}/setup", "label_routes:start_setup"),
        HttpRoute("POST", f"{_LABEL_STUDIO_AT}/validate", "label_routes:start_validate", api="metadata"),
        HttpRoute("GET", f"{_LABEL_STUDIO_AT}/versions", "label_routes:start_versions", api="metadata"),
        HttpRoute("POST", f"{_LABEL_STUDIO_AT}/predict", "label_routes:start_predict"),
    ),
    prefix="/label-studio/",
    words="label_routes:words",
    key_of="label_routes:key_of",
)
_CVAT = Routes(
    table=(
        HttpRoute("GET", "/api/functions", "cvat_routes:start_list", api="metadata"),
        HttpRoute("GET", "/api/functions/{function}", "cvat_routes:start_one", api="metadata"),
        HttpRoute("POST", "/api/function_invocations", "cvat_routes:start_invocation"),
    ),
    prefix="/api/function",
    words="cvat_routes:words",
)
_TF_MODEL = "/tfserving/v1/models/{name}"
_TFSERVING = Routes(
    table=(
        HttpRoute("GET", _TF_MODEL, "tf_routes:start_status", api="metadata"),
        HttpRoute("POST", _TF_MODEL, "tf_routes:start_call"),
        HttpRoute("GET", f"{_TF_MODEL}/metadata", "tf_routes:start_metadata", api="metadata"),
        HttpRoute("GET", f"{_TF_MODEL}/versions/{{version}}", "tf_routes:start_status", api="metadata"),
        HttpRoute("POST", f"{_TF_MODEL}/versions/{{version}}", "tf_routes:start_call"),
        HttpRoute(
            "GET", f"{_TF_MODEL}/versions/{{version}}/metadata", "tf_routes:start_metadata", api="metadata"
        ),
    ),
    prefix="/tfserving/",
    words="tf_routes:words",
)
# ---- of the other extensions, again ----
_AGES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)  # seconds
_OTLP = "OTEL_EXPORTER_OTLP"
_GUARDS = ("disagreement", "late", "errors", "feedback", "slower")
_STATES = (
    *("loading", "checked", "shadow", "canary", "full", "standby", "retired", "paused"),
    *("done", "rolled-back", "failed"),
)
_DRIFT_WORDS = (
    *("size", "grey", "brightness", "sharpness", "contrast", "bytes"),
    *("classes", "boxes", "area", "score", "entropy", "embedding"),
)
_WRITES = "{key} does not go with [generate]"
_PIPELINE = "{key} does not go with a pipeline:"
_COMPARED = (
    "decoupled: a rollout compares the one response to a request; leave it and a registry's candidate out"
)
_IN_TILES = "tiles do not go with"
_SEQUENCES = "sequences do not go with"
_PART_OF_A_SEQUENCE = f"{_SEQUENCES} a registry's candidate, which gets some requests of a sequence"

_CACHE_VERB = Verb(
    "command:CacheVerb",
    USE,
    "Show a model's response cache in a running server, or clear it.",
)
_ROLLOUT_VERB = Verb("command:RolloutVerb", USE, "Replace a model's version by a new one, step by step.")
_REGISTRY_VERB = Verb(
    "command:RegistryVerb",
    PREPARE,
    "Resolve an address in a model registry (MLflow), and fetch its model.",
)
_DRIFT_VERB = Verb(
    "command:DriftVerb",
    CHECK,
    "Check whether a model's images and responses have changed.",
)
_LABEL_VERB = Verb(
    "label_command:LabelVerb",
    CHECK,
    "Make a data set of images that a server stored, with its responses as first labels.",
)
_PIPELINE_VERB = Verb("command:PipelineVerb", PREPARE, "Check a pipeline, and show its steps.")
_CASCADE_VERB = Verb(
    "command:CascadeVerb",
    PREPARE,
    "Find the threshold of a cascade, by running both of its models on images.",
)
_COMPILE_VERB = Verb(
    "command:CompileVerb",
    PREPARE,
    "Compile a PyTorch model for the device of this machine, and write the result beside it.",
)
_OPTIMIZE_VERB = Verb(
    "command:OptimizeVerb",
    PREPARE,
    "Find a cheaper form of a model that answers alike, and write it as the next version.",
)
_DEPLOY_VERB = Verb(
    "command:DeployVerb",
    CAPACITY,
    "Write a balancer's configuration or Kubernetes manifests, or serve on Ray.",
)
_WATCH_VERB = Verb(
    "command:WatchVerb",
    USE,
    "Send frames of videos and cameras to a running server; a newer frame replaces a waiting one.",
)

BUILT_IN: tuple[Extension, ...] = (
    # Protocols of other tools wrap nothing. They are first, because of routes alike the first one counts.
    Extension(name="roboflow", api="{url}/roboflow", begin="roboflow_settings:begin", routes=(_ROBOFLOW,)),
    Extension(name="doods", api="{url}/doods", routes=(_DOODS,)),
    Extension(
        name="frigate",
        api="{url}/v1/vision/detection",
        begin="frigate_settings:begin",
        routes=(_FRIGATE,),
        verbs={"frigate": _FRIGATE_VERB},
    ),
    Extension(name="mcp", api="{url}/mcp", routes=(_MCP,)),
    Extension(
        name="label_studio",
        api="{url}/label-studio",
        routes=(_LABEL_STUDIO,),
        engine="label_access:engine",
    ),
    Extension(name="cvat", api="{url} (CVAT_NUCLIO_HOST and CVAT_NUCLIO_PORT)", routes=(_CVAT,)),
    Extension(name="tfserving", api="{url}/tfserving", routes=(_TFSERVING,)),
    Extension(name="embeddings", api="{url}/v1", needs=("text",), routes=(_EMBEDDINGS,)),
    Extension(
        name="cache",
        verbs={"cache": _CACHE_VERB},
        owns=("cache", "response_cache"),
        triton=("response_cache",),
        settings="settings:PART",
        columns=(
            Columns("results", words=("hit", "similar", "joined", "shared", "miss", "bypass")),
            Columns("hit_seconds"),
            Columns("miss_seconds"),
            Columns(
                "age", "histogram", bounds=(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
            ),
            Columns("evicted", words=("ttl", "room", "replaced", "reload", "cleared")),
            Columns("audits", words=("same", "differs", "skipped", "exact-same", "exact-differs")),
            Columns("entries", "gauge"),
            Columns("bytes", "gauge"),
            Columns("sources_off", "gauge"),
            Columns("shared_up", "gauge"),
            Columns("shared_timeouts"),
        ),
        metrics="""
nv_cache_num_hits_per_model          counter    model   cell:results=hit+similar+joined+shared  Requests answered from the cache, of every kind.
nv_cache_num_misses_per_model        counter    model   cell:results=miss                       Requests that were looked up in the cache and had to be computed.
nv_cache_hit_duration_per_model      counter    model   us:hit_seconds                          Time from the lookup to the response, of requests answered from the cache, in microseconds.
nv_cache_miss_duration_per_model     counter    model   us:miss_seconds                         Time from the lookup to the response, of requests that were computed, in microseconds.
carpool_cache_requests_total         counter    model   result:results                          Requests to a model with a response cache, by the result of the lookup.
carpool_cache_age_seconds            histogram  model   all:age                                 Age of responses that were answered from the cache.
carpool_cache_evicted_total          counter    model   why:evicted                             Evicted cache entries, by reason.
carpool_cache_audit_total            counter    model   verdict:audits                          Hits for similar images that were also computed, by the result of the comparison.
carpool_cache_entries                gauge      model   cell:entries                            Cached responses.
carpool_cache_bytes                  gauge      model   cell:bytes                              Memory of the cached responses.
carpool_cache_sources_off            gauge      model   cell:sources_off                        Sources whose similar images are computed, because an audit found too many differences.
carpool_cache_shared_up              gauge      server  cell:shared_up                          Front ends that reach the server of the shared cache.
carpool_cache_shared_timeouts_total  counter    server  cell:shared_timeouts                    Queries to that server that timed out.
""",  # noqa: E501
        statistics={
            "cache_hit": ("results=hit+similar+joined+shared", "hit_seconds"),
            "cache_miss": ("results=miss", "miss_seconds"),
        },
        options=(
            ServerOption("cache_url", "", secret=True),  # has a password: `ps` shows no variables
            ServerOption("cache_wait_ms", 2.0, within=(0.1, 1000.0)),
            ServerOption("cache_mb", 64.0, within=(0.0, 1e6)),  # of stored answers, over all front ends
        ),
        starts=("cache_url",),
        begin="settings:begin",
        front="front:front",
        engine="engine:engine",
        routes=(_CACHE,),
    ),
    Extension(
        name="drift",
        routes=(_DRIFT,),
        verbs={"drift": _DRIFT_VERB, "label": _LABEL_VERB},
        owns=("drift",),
        settings="settings:PART",
        columns=(
            Columns("psi", "gauge", _DRIFT_WORDS),  # this and the next: 1 more than is said, 0 if unknown
            Columns("alarm", "gauge", _DRIFT_WORDS),
            Columns("kept"),
            Columns("cameras", "state", ("black", "frozen", "blurred", "changed")),
        ),
        metrics="""
carpool_drift_psi             gauge    model   what:psi       Distance of the last window from the reference (PSI without its noise), by measure.
carpool_drift_alarm           gauge    model   what:alarm     1 while the distance was beyond the limit in two windows in a row, by measure.
carpool_uncertain_kept_total  counter  model   cell:kept      Images stored for labelling.
carpool_camera_state          gauge    source  state:cameras  1 for the state of a camera, else 0; all 0 for a healthy camera.
""",  # noqa: E501
        front="front:front",
        engine="engine:engine",
    ),
    Extension(  # inside of caches: what stable answers in a candidate's place is not the candidate's
        name="rollout",
        verbs={"rollout": _ROLLOUT_VERB},
        owns=("rollout",),
        beside="rollout.toml",
        settings="settings_reader:PART",
        routes=(_ROLLOUTS,),
        options=(
            ServerOption(
                "allow_rollouts",
                False,
                words="Let clients that may control models start rollouts in any mode.",
                after="strict_readiness",
            ),
            ServerOption(
                "rollout_state",
                "",
                secret=True,
                words="Where replicas share rollouts: file:/mnt/rollouts (a shared folder) or "
                "redis://HOST:6379.",
                metavar="WHERE",
                after="allow_rollouts",
            ),
        ),
        starts=("allow_rollouts", "rollout_state"),
        begin="shared_places:begin",
        kept="rollouts/*.json",
        engine="engine:engine",
        front="front:front",
        choice_fields=("x-carpool-rollout",),
        columns=(
            Columns("compared", words=("same", "differs", "candidate-failed")),
            Columns("skipped", words=("busy", "slots", "late", "thinned", "failed")),
            Columns("fallbacks"),
            Columns("rollbacks", words=_GUARDS),
            Columns("feedback", words=("false-alert", "missed", "right")),
            Columns("state", "gauge", _STATES),
            Columns("share", "gauge", ("answers", "shadow")),
            Columns(
                "bound", "gauge", tuple(f"{guard},{end}" for guard in _GUARDS for end in ("low", "high"))
            ),
        ),
        metrics="""
carpool_rollout_state            gauge    some   state:state       1 for the state of the rollout of this version.
carpool_rollout_share            gauge    some   kind:share        Share of the requests without a version that this candidate answers, or gets as a shadow.
carpool_rollout_compared_total   counter  some   verdict:compared  Responses of this candidate that were compared with those of the stable version.
carpool_rollout_skipped_total    counter  some   reason:skipped    Comparisons that were skipped, by reason.
carpool_rollout_bound            gauge    some   guard,end:bound   Confidence bounds of a guard's number: low above the limit rolls the candidate back, high below it proves the guard; -1 for no bound.
carpool_rollout_fallbacks_total  counter  some   cell:fallbacks    Requests that failed on this candidate and were answered by the stable version.
carpool_rollout_rollbacks_total  counter  some   guard:rollbacks   Rollouts of this version that a guard rolled back.
carpool_feedback_total           counter  some   verdict:feedback  Feedback of clients about responses of this version.
""",  # noqa: E501
    ),
    Extension(
        name="ensembles",
        triton=("ensemble_scheduling", "platform=ensemble"),
        settings="triton:PART",
        serving="engine:SERVING",
    ),
    Extension(  # outside of pipelines, as it runs those with `escalate` in another way
        name="cascades",
        needs=("pipelines",),
        settings="settings:PART",
        front="front:front",
        engine="engine:engine",
        verbs={"cascade": _CASCADE_VERB},
        columns=(
            Columns("answered", words=("cheap", "big", "degraded")),
            Columns("saved"),
            Columns("audits", words=("same", "differs", "skipped")),
        ),
        metrics="""
carpool_cascade_total                counter  some   by:answered   Responses of a cascade, by model: the cheap one, the large one, or the cheap one because there was no time for the large one.
carpool_cascade_agreement            gauge    some   share:audits  Share of the cheap model's responses that the large one agreed with in audits; absent before the first.
carpool_cascade_saved_seconds_total  counter  some   cell:saved    Time of the large model that the cascade saved, less that of the cheap one.
""",  # noqa: E501
    ),
    Extension(
        name="pipelines",
        no_step="is a pipeline, which only front ends run: no step can be one",
        verbs={"pipeline": _PIPELINE_VERB},
        file="pipeline.toml",
        settings="pipeline_toml:PART",
        meets={
            "cache": f"{_PIPELINE} neither its responses nor those of its steps are cached",
            "rollout": f"{_PIPELINE} roll out the models that are its steps",
            "registry": f"{_PIPELINE} roll out the models that are its steps",
            "sequences": f"{_PIPELINE} its steps take images one by one",
            "streams": f"{_PIPELINE} it gives one response per image",
            "text": f"{_PIPELINE} none of its steps writes token by token",
        },
        serving="engine:SERVING",
        pictures="page:PICTURES",
        columns=(Columns("crops", words=("device", "cpu")),),
        metrics="""
carpool_pipeline_step_duration_seconds  histogram step:pipeline phase:STEP_PHASES  Time of requests in a step of a pipeline: waiting for a batch, in the batch, and before it if its crops are cut.
carpool_pipeline_fan_out                histogram step:pipeline all:FAN_OUT        Images per request in a step.
carpool_pipeline_later_seconds          gauge     step:pipeline cell:STEP_LATER    Part of the SLO that requests in this step leave to the later steps now.
carpool_pipeline_shed_total             counter   step:pipeline reason:SHED        Requests that the scheduler chose not to run in this step, by reason.
carpool_pipeline_wasted_total           counter   step:pipeline cell:STEP_WASTED   Requests that this step ran and that were given up later.
carpool_pipeline_device_pictures_total  counter   some          crops:crops        Images of a pipeline that a device decoded, by where later steps cut their crops: there, or on the CPU for lack of device memory.
""",  # noqa: E501
        front="front:front",
        engine="engine:engine",
    ),
    Extension(  # inside of caches and rollouts: they see one request
        name="tiles",
        owns=("tiles",),
        settings="settings:PART",
        picture_options=("tile",),
        pictures="page:PICTURES",
        meets={
            "pipelines": f"{_IN_TILES} a pipeline: ask for them of a model that is one step",
            "rollout": f"{_IN_TILES} a rollout, which compares versions on whole images",
            "registry.candidate": f"{_IN_TILES} a registry's candidate, which is compared on whole images",
            "sequences": f"{_IN_TILES} sequences",
            "streams": f"{_IN_TILES} a model that may give several responses",
            "text": f"{_IN_TILES} a model that writes",
        },
        front="front:front",
        engine="engine:engine",
        routes=(_TILES,),
    ),
    Extension(
        name="sequences",
        no_step="takes sequences, and requests of a step belong to none",
        owns=("sequences",),
        triton=("sequence_batching",),
        settings="settings_reader:PART",
        meets={
            "rollout": f"{_SEQUENCES} a rollout, which sends requests of one sequence to two versions",
            "registry.candidate": _PART_OF_A_SEQUENCE,
            "cache": f"{_SEQUENCES} a cache: the same request has another response later",
            "drift": f"{_SEQUENCES} quality measures of images",
        },
        columns=(Columns("states", "gauge", ("live", "backlog")),),
        metrics="""
carpool_sequences  gauge  model  state:states  Sequences of a model: live in an instance, or waiting for a slot in one.
""",  # noqa: E501
        serving="engine:SERVING",
        instance="instance:wrap",
    ),
    Extension(
        name="streams",
        no_step="is decoupled, and a step needs exactly one response",
        routes=(_GENERATE,),
        fields=("decoupled",),
        settings="settings:PART",
        meets={
            "sequences": "decoupled: the next request of a sequence waits for the one response to the last; "
            "leave [sequences] out",
            "cache": "decoupled: a cache stores the one response to a request; switch it off for this model",
            "rollout": _COMPARED,
            "registry.candidate": _COMPARED,
        },
        serving="engine:SERVING",
    ),
    Extension(
        name="text",
        no_step="writes token by token, and no step does that",
        no_batches="writes text: it has no batches, but an encoder and steps",
        needs=("torch",),
        owns=("generate", "encoder", "decoder", "ttft_ms", "per_token_ms"),
        settings="settings_reader:PART",
        meets={
            **dict.fromkeys(("cache", "rollout", "sequences", "streams"), _WRITES),
            "registry.candidate": f"{_WRITES}, whose responses are not compared",
        },
        serving="engine:SERVING",
        homes={"pytorch": "torch_home", "fake": "fake_stepper"},
        hosted="runner_text:HOSTED",
        routes=(_TEXT, _OPENAI),
        more_of_verbs={"simulate": "command:SimulateText", "profile": "command:ProfileText"},
        columns=(
            Columns("first_token", "histogram", bounds="seconds"),
            Columns("token", "histogram", bounds="seconds"),
            Columns("encode_size", "histogram", bounds="images"),
            Columns("step_width", "histogram", bounds="images"),
            Columns("tokens"),
            Columns("slots", "gauge", ("used", "free")),
        ),
        history={
            "first_token": "first_token",
            "tokens": "tokens",
            "slots": ("slots=used", "slots=used+free"),
        },
        metrics="""
carpool_text_first_token_seconds  histogram some  all:first_token  From a request to the first token of its response, of a model that writes text.
carpool_text_token_seconds        histogram some  all:token        From one token of a response to the next.
carpool_text_encode_size          histogram some  all:encode_size  Images that were encoded together.
carpool_text_step_width           histogram some  all:step_width   Slots that a step ran, used or not.
carpool_text_tokens_total         counter   some  cell:tokens      Tokens that were written, ends of texts included.
carpool_text_slots                gauge     some  state:slots      Responses that are being written, and free slots.
""",  # noqa: E501
        engine="engine:engine",
        front="front:front",
    ),
    Extension(
        name="registry",
        needs=("rollout",),
        options=(
            ServerOption(
                "registry",
                "",
                secret=True,
                words="MLflow server for models:/NAME@ALIAS. Default: MLFLOW_TRACKING_URI.",
                metavar="URL",
                after="poll_s",
            ),
            ServerOption("remote_gb", 64.0, within=(0.001, 1e6), after="models"),  # of one repository
            ServerOption("remote_files", 10_000, within=(1, 1e6), after="remote_gb"),
        ),
        addresses=r"(?:models|s3|gs|gcs|hf|https|http|memory):/.+|hf:.+",
        fetch="fetching:fetched",
        engine="engine:engine",
        verbs={"registry": _REGISTRY_VERB},
        owns=("registry",),
        settings="settings:PART",
        columns=(
            Columns("moves"),
            Columns("up", "largest"),  # 1 down, 2 up; 0: there is none
            Columns("heard", "largest"),  # when it answered last, by the clock that all processes share
        ),
        metrics="""
carpool_registry_moves_total  counter  model   cell:moves  Times that the model's address in the registry moved and was followed; a version continues the count of the previous one.
carpool_registry_up           gauge    server  less:up     1 while the registry responds, else 0; absent if no model follows one.
carpool_registry_age_seconds  gauge    server  age:heard   Time since the last response of the registry; absent if no model follows one.
""",  # noqa: E501
    ),
    Extension(
        name="torch",
        verbs={"compile": _COMPILE_VERB},
        serving="engine:SERVING",
        compiled="found_compiled:found_compiled",
        kinds=(
            BackendKind(
                name="pytorch",
                home="carpool.extensions.torch.pytorch",
                suffixes=(".pt", ".pt2", ".torchscript", ".py", ".pth", ".safetensors"),
                after="onnxruntime",
                at_home=(".pt", ".pt2", ".torchscript"),
                platforms=("pytorch_libtorch", "torch_aoti"),
                package="torch",
                imports="torch",
                extra="torch",
                process="runner",
                threaded=True,
                reshapes=False,
                values_on_device=True,
                pictures_on_device=True,
                parameters=(),
                extension="torch",
                table=True,
            ),
            BackendKind(
                name="onnx_torch",
                home="carpool.extensions.torch.pytorch",
                suffixes=(".onnx",),
                after="pytorch",
                package="onnx",
                imports="onnx",
                extra="onnx-torch",
                process="runner",
                threaded=True,
                reshapes=False,
                values_on_device=True,
                pictures_on_device=True,
                parameters=(),
                extension="torch",
            ),
            BackendKind(
                name="tensorrt",
                home="carpool.backends.hosted",
                suffixes=(".plan", ".engine"),
                after="tensorflow",
                at_home=(".plan", ".engine"),
                gives_way=True,
                platforms=("tensorrt_plan",),
                package="tensorrt",
                imports="tensorrt",
                process="worker",
                program="carpool.extensions.torch.tensorrt_model",
                on_gpus=True,
                parameters=(),
            ),
            BackendKind(
                name="transformers",
                home="carpool.backends.hosted",
                suffixes=(".safetensors",),
                after="tensorrt",
                beside="config.json",
                package="transformers",
                imports="transformers",
                process="worker",
                program="carpool.extensions.torch.transformers_model",
                threaded=True,
                parameters=(),
            ),
        ),
        model_process="process:make_process",
        zygote="zygote_start:begin_zygote",
    ),
    Extension(
        name="inputs",
        owns=("inputs",),
        known_inputs=("orig_target_sizes", "pixel_mask"),
        settings="settings:PART",
        instance="instance:wrap",
    ),
    Extension(name="recording", starts=("record",), begin="front:begin", front="front:front"),
    Extension(
        name="tracing",
        begin="settings:begin",
        doctor="doctor:findings",
        options=(
            ServerOption(
                "trace_file",
                "",
                words="File for traces of single requests. Default: no traces.",
                after="metrics_config",
            ),
            ServerOption(
                "otlp_endpoint",
                "",
                secret=True,
                words="OpenTelemetry collector for spans of requests, OTLP over HTTP, like "
                "http://localhost:4318.",
                metavar="URL",
                after="trace_file",
            ),
            ServerOption(
                "trace_sample",
                None,
                within=(0.0, 1.0),
                words="Share of requests with spans. Default: the caller's choice, OTEL_* or 0.01.",
                after="otlp_endpoint",
            ),
        ),
        starts=("trace_file", "otlp_endpoint", f"{_OTLP}_ENDPOINT", f"{_OTLP}_TRACES_ENDPOINT"),
        routes=(_TRACING,),
        columns=(Columns("spans", words=("exported", "dropped", "failed")),),
        metrics="""
carpool_spans_total  counter  server  result:spans  Spans for OpenTelemetry, by result: exported, dropped because too many waited, or failed because the collector did not accept them.
""",  # noqa: E501
        front="front:front",
        engine="engine:engine",
    ),
    Extension(name="torchserve", archives={".mar": "archive:unpacked"}, routes=(_TORCHSERVE,)),
    Extension(name="cameras", verbs={"watch": _WATCH_VERB}),
    Extension(name="deploy", verbs={"deploy": _DEPLOY_VERB}),
    Extension(name="optimize", verbs={"optimize": _OPTIMIZE_VERB}),
    Extension(name="ray", needs=("deploy",)),
)


def started(settings: object) -> tuple[Extension, ...]:
    """Returns the extensions that these `ServerSettings`, or the environment, switch on."""
    return tuple(one for one in installed().values() if _is_started(one, settings))


def _is_started(one: Extension, settings: object) -> bool:
    named: Collection[str] = getattr(settings, "apis", ())
    on = (bool(one.api) and one.name in named) or any(_is_set(settings, name) for name in one.starts)
    folder: Path | None = getattr(settings, "state_dir", None)
    on = on or any(map(one.fetches, getattr(settings, "models", ())))
    return on or (bool(one.kept) and folder is not None and any(folder.glob(one.kept)))


def _is_set(settings: object, name: str) -> bool:
    return bool(os.environ.get(name) if name.isupper() else getattr(settings, name))


@cache
def choice_fields() -> Mapping[bytes, Extension]:
    """Returns the extensions by the fields of a request's head that ask for one of several versions."""
    return {name.encode(): one for one in installed().values() for name in one.choice_fields}


@cache
def picture_options() -> Mapping[str, Extension]:
    """Returns the extensions by the options of picture routes that ask for them."""
    return {name: one for one in installed().values() for name in one.picture_options}


@cache
def installed() -> Mapping[str, Extension]:
    """Returns every extension by name: those of other packages first, since they are outermost."""
    from importlib.metadata import entry_points  # its import takes longer than most processes use it

    others = {point.name: point.load() for point in entry_points(group=GROUP)}
    return others | {one.name: one for one in BUILT_IN}
