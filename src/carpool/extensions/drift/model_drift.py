"""Compares a model's traffic with its reference: for each version that serves, as a whole and by camera. The
caller passes the time, so that a test of a day takes only as long as its pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from carpool.core.histogram import Tally
from carpool.extensions.drift.measures import MEASURES, WORDS, MeasureCounts, Values, family, read_counts
from carpool.extensions.drift.settings import DriftSettings
from carpool.extensions.drift.streams import LEAST, Camera, DriftStream, read_camera, read_stream

MOST_SOURCES = 64
_MOST_VERSIONS = 4
_ALL = ""  # the stream of all pictures, from any source
_SILENT_S = 3600.0
_FORMAT = 1
_HOUR = 3600.0


class SampledAnswer(NamedTuple):
    """Represents one picture and its answer."""

    source: str
    values: Values
    look: str  # a digest of its pixels; empty: not looked at
    black: bool


class DriftEvent(NamedTuple):
    """Describes an event for the log."""

    name: str
    facts: Mapping[str, Any]
    bad: bool = False


class Reference:
    """Holds what the traffic was like, by stream; and what is being learned to take its place."""

    def __init__(self) -> None:
        self.labels = ""  # a digest of those that its answers had
        self.streams: dict[str, MeasureCounts] = {}
        self.learning: dict[str, MeasureCounts] = {}
        self.fixed = False  # it is from a file: nothing is added to it
        self.learn_s = 0.0
        self.learner = ""  # the version that is learned from: one, or a candidate would become the standard
        self.heard = 0.0  # when that one last answered

    def take(self, version: str, labels: str, name: str, values: Values, now: float) -> None:
        if version != self.learner and (not self.learner or now - self.heard > _SILENT_S):
            self.learner = version
            self.learning.clear()
        if version != self.learner or self.fixed:
            return
        self.heard = now
        if name in self.learning or name not in self.streams:
            self.learning.setdefault(name, MeasureCounts(now)).add(values)
        if not self.streams:
            self.labels = labels

    def learned(self, now: float) -> list[str]:
        """Returns the streams whose reference is another one from now on."""
        done = []
        for name, counts in self.learning.items():
            counts.began = min(counts.began, now)
            if now - counts.began >= self.learn_s and counts.pictures >= LEAST:
                done.append(name)
        for name in done:
            self.streams[name] = self.learning.pop(name)
        return done

    def written(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "labels": self.labels,
            "learner": self.learner,
            "heard": self.heard,
            "learn_s": self.learn_s,
            "streams": {name: counts.written() for name, counts in self.streams.items()},
            "learning": {name: counts.written() for name, counts in self.learning.items()},
        }


def read_reference(document: Any, *, fixed: bool = False) -> Reference:
    """Reads a reference, and raises ValueError where it is none."""
    try:
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']!r} is not {_FORMAT}")
        reference = Reference()
        reference.fixed = fixed
        reference.labels = str(document["labels"])
        reference.streams = {str(name): read_counts(one) for name, one in document["streams"].items()}
        if not fixed:
            reference.learner, reference.heard = str(document["learner"]), float(document["heard"])
            reference.learn_s = float(document["learn_s"])
            reference.learning = {str(name): read_counts(one) for name, one in document["learning"].items()}
        return reference
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a reference: {error}") from None


class VersionDrift:
    """Holds one version's streams and cameras."""

    def __init__(self, now: float) -> None:
        self.labels = ""
        self.streams: dict[str, DriftStream] = {_ALL: DriftStream(now)}
        self.cameras: dict[str, Camera] = {}
        self.states: dict[str, str] = {}  # as last reported

    def place(self, source: str, now: float) -> str:
        """Returns the source, if it has a stream or gets one. When all are taken, one that never had enough
        pictures for a window and has been silent for an hour makes room: else who names another source with
        every picture would keep all cameras out that come after."""
        if not source or source in self.streams:
            return source
        if len(self.streams) > MOST_SOURCES:
            idle = (
                name
                for name, stream in self.streams.items()
                if name and stream.last is None and now - stream.silent_since > _SILENT_S
            )
            gone = next(idle, None)
            if gone is None:
                return _ALL
            del self.streams[gone]
            self.cameras.pop(gone, None)
            self.states.pop(gone, None)
        self.streams[source] = DriftStream(now)
        return source

    def state(self, source: str, reference: Mapping[str, MeasureCounts]) -> str:
        stream, camera = self.streams[source], self.cameras.get(source, Camera())
        last, before = stream.last, reference.get(source)
        softer = last is not None and before is not None and last.fell(before, "sharpness")
        return camera.state(stream.alarms, softer=softer)

    def written(self) -> dict[str, Any]:
        return {
            "labels": self.labels,
            "streams": {name: stream.written() for name, stream in self.streams.items()},
            "cameras": {name: camera.written() for name, camera in self.cameras.items()},
            "states": self.states,
        }


class ModelDrift:
    def __init__(self, name: str, settings: DriftSettings) -> None:
        self.name = name
        self.settings = settings
        self.reference = Reference()
        self.reference.learn_s = settings.learn_s
        self.versions: dict[str, VersionDrift] = {}
        self.trouble = ""  # why nothing can be judged, in words

    def take(self, version: str, labels: str, seen: SampledAnswer, now: float) -> None:
        found = self._version(version, now)
        found.labels = labels
        source = found.place(seen.source, now)
        found.streams[_ALL].add(seen.values, now)
        self.reference.take(version, labels, _ALL, seen.values, now)
        if not source:
            return
        # Of an embedding's many directions a camera keeps none: 64 times them would be much, for little.
        values = {key: one for key, one in seen.values.items() if family(key) != "embedding"}
        found.streams[source].add(values, now)
        self.reference.take(version, labels, source, values, now)
        if seen.look:
            found.cameras.setdefault(source, Camera()).seen(seen.look, seen.black, now)

    def _version(self, version: str, now: float) -> VersionDrift:
        found = self.versions.get(version)
        if found is None:
            found = self.versions[version] = VersionDrift(now)
            if len(self.versions) > _MOST_VERSIONS:
                oldest = min(self.versions, key=lambda one: self.versions[one].streams[_ALL].silent_since)
                del self.versions[oldest]
        return found

    def look(self, now: float) -> list[DriftEvent]:
        """Closes windows whose time is over, and returns the events to report."""
        events = []
        known = {name for version in self.versions.values() for name in version.streams}
        for name in self.reference.learning.keys() - known:
            del self.reference.learning[name]  # a source that made room for another
        for name in self.reference.learned(now):
            if not name:
                events.append(DriftEvent("drift-reference-learned", {"model": self.name}))
            for version in self.versions.values():
                if name in version.streams:
                    version.streams[name].forget()
        for number, version in self.versions.items():
            events += self._look_at(number, version, now)
        return events

    def _look_at(self, number: str, version: VersionDrift, now: float) -> Iterator[DriftEvent]:
        reference = {} if self._other_labels(version) else self.reference.streams
        length, limit = self.settings.window_h * _HOUR, self.settings.psi
        for name, stream in version.streams.items():
            facts: dict[str, Any] = {"model": self.name, "version": number}
            change = stream.look(now, length, limit, reference.get(name))
            if change is not None and not name:
                facts["what"] = ", ".join(change.what)
                yield DriftEvent("drift-over" if change.over else "drift", facts, not change.over)
            if not name:
                continue
            state = version.state(name, reference)
            if state != version.states.get(name, ""):
                version.states[name] = state
                facts |= {"source": name, "state": state or "well", "what": ", ".join(stream.alarms)}
                yield DriftEvent("camera-state", facts, bool(state))

    def _other_labels(self, version: VersionDrift) -> bool:
        return bool(self.reference.streams) and version.labels != self.reference.labels

    # ---- by hand

    def learn(self, hours: float, now: float) -> None:
        """Learn a new reference from now on; the one there is holds until then."""
        reference, self.trouble = self.reference, ""
        reference.fixed, reference.learn_s = False, hours * _HOUR
        served = max(self.versions.items(), key=lambda one: one[1].streams[_ALL].silent_since, default=None)
        if served is None:
            reference.learning, reference.learner = {}, ""
            return
        number, version = served
        reference.learner, reference.heard = number, now
        if self._other_labels(version):
            reference.streams = {}
        reference.learning = {name: MeasureCounts(now) for name in version.streams}

    def reset(self) -> None:
        """Forget everything, and begin again."""
        fresh = ModelDrift(self.name, self.settings)
        self.reference, self.versions, self.trouble = fresh.reference, fresh.versions, ""

    # ---- what is reported and stored

    def says(self, version: VersionDrift) -> str:
        """Returns how it is, in a sentence."""
        reference, stream = self.reference, version.streams[_ALL]
        before = reference.streams.get(_ALL)
        if self.trouble:
            return self.trouble
        if self._other_labels(version):
            return "its reference was learned with other labels: learn another one; nothing is judged"
        if before is None and _ALL in reference.learning:
            learning = reference.learning[_ALL]
            hours = reference.learn_s / _HOUR
            return f"learning its reference: {learning.pictures} images of at least {LEAST}, for {hours:g} h"
        if before is None:
            return "there is no reference yet"
        if before.pictures < LEAST:
            return f"its reference has {before.pictures} images, fewer than {LEAST}: nothing is judged"
        if stream.alarms:
            cause = WORDS[family(stream.alarms[0])]
            return f"{cause} changed: PSI {stream.psi[stream.alarms[0]]:.2f}, limit {self.settings.psi:g}"
        if stream.last is None:
            return f"first window: {stream.window.pictures} images of at least {LEAST}"
        return "as in the reference"

    def document(self, number: str, now: float) -> dict[str, Any]:
        version = self.versions.get(number) or VersionDrift(now)
        reference, stream = self.reference, version.streams[_ALL]
        shown = stream.window if stream.window.pictures >= LEAST or stream.last is None else stream.last
        before = reference.streams.get(_ALL)
        return {
            "model": self.name,
            "version": number,
            "says": self.says(version),
            "alarms": list(stream.alarms),
            "limit": self.settings.psi,
            "window": {
                "hours": self.settings.window_h,
                "seconds": max(0.0, now - stream.window.began),
                "pictures": stream.window.pictures,
                "least": LEAST,
            },
            "reference": {
                "pictures": 0 if before is None else before.pictures,
                "learning": bool(reference.learning),
                "other_labels": self._other_labels(version),
            },
            "measures": _measures(shown, before, stream),
            "sources": [
                {
                    "source": name,
                    "state": version.states.get(name, ""),
                    "alarms": list(one.alarms),
                    "pictures": one.window.pictures,
                    "learned": name in reference.streams,
                    "psi": {what: round(psi, 4) for what, psi in one.psi.items()},
                }
                for name, one in version.streams.items()
                if name
            ],
        }

    def written(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "model": self.name,
            "reference": self.reference.written(),
            "versions": {number: version.written() for number, version in self.versions.items()},
        }

    def restore(self, document: Any) -> None:
        """Restores a document, and raises ValueError where it is not what `written` gave, and then nothing
        has changed."""
        try:
            reference = read_reference(document["reference"])
            versions = {str(number): _read_version(one) for number, one in document["versions"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the drift of a model: {error}") from None
        self.reference, self.versions = reference, versions


def _read_version(document: Mapping[str, Any]) -> VersionDrift:
    version = VersionDrift(0.0)
    version.labels = str(document["labels"])
    version.streams |= {str(name): read_stream(one) for name, one in document["streams"].items()}
    version.cameras = {str(name): read_camera(one) for name, one in document["cameras"].items()}
    version.states = {str(name): str(state) for name, state in document["states"].items()}
    return version


def _measures(
    shown: MeasureCounts, before: MeasureCounts | None, stream: DriftStream
) -> list[dict[str, Any]]:
    """Returns the measures, each with both outlines in shares, the furthest first."""
    found = []
    for measure, counted in shown.measures.items():
        reference = None if before is None else before.measures.get(measure)
        bins = MEASURES[measure]
        names: list[Any]
        if isinstance(counted, Tally):
            known = reference if isinstance(reference, Tally) else counted
            names, first, now = counted.compared(known)
        else:
            assert bins is not None
            one_more = 1.0 if measure == "boxes" else 0.0
            names, now = [edge - one_more for edge in bins.edges()], counted.counts
            first = [] if reference is None or isinstance(reference, Tally) else reference.counts
        words = WORDS[family(measure)]
        line: dict[str, Any] = {"what": measure, "words": words, "bins": names, "now": _shares(now)}
        line["reference"] = _shares(first) if reference is not None else []
        line |= {"psi": stream.psi.get(measure), "alarm": measure in stream.alarms}
        found.append(line)
    return sorted(found, key=lambda line: -(line["psi"] or 0.0))


def _shares(counts: list[float]) -> list[float]:
    total = sum(counts) or 1.0
    return [round(count / total, 5) for count in counts]
