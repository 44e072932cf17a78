// The console: one document a second comes in, and every part of the page is shown what concerns it.

import { CachePanel } from "./cache.js";
import { CurvePanel } from "./curve_panel.js";
import { find, setText, setTone } from "./dom.js";
import { DriftPanel } from "./drift.js";
import { bytes, count, duration, NOTHING } from "./format.js";
import { health, promise, taskName, worthALook } from "./health.js";
import { History } from "./history.js";
import { hasKey, KeyPanel } from "./key.js";
import { LivePanel } from "./live.js";
import { keyOf, ModelList } from "./models.js";
import { PipelinePanel } from "./pipeline.js";
import { poll } from "./poll.js";
import { RolloutPanel } from "./rollout.js";
import { Tiles } from "./tiles.js";
import { offerThemes } from "./themes.js";
import { SendersPanel } from "./senders.js";
import { Timeline } from "./timeline.js";
import { TryPanel } from "./try.js";
import { WritingPanel } from "./writing.js";

const SHORT_S = 3;
const RECENT_S = 10;
const MINUTE_S = 60;
const KEPT_POINTS = 900;
const LONGEST_QUERY = 4000;

class Console {
  #histories = new Map();
  #traffic = null;
  #selected = null;
  #time = new Timeline(() => this.#showModel());
  #points = []; // of the server, by the second
  #document = null;
  #profile = null; // of the model that is looked at
  #asked = 0;
  #list = new ModelList((key) => this.#select(key));
  #tiles = new Tiles();
  #curve = new CurvePanel();
  #drift = new DriftPanel();
  #live = new LivePanel();
  #senders = new SendersPanel();
  #writing = new WritingPanel();
  #cache = new CachePanel();
  #pipeline = new PipelinePanel();
  #try = new TryPanel();
  #key = new KeyPanel(() => askNow());
  #rollout = new RolloutPanel(this.#key);

  constructor() {
    this.#live.pointed = (age) => this.#time.zoomTo(age);
    new ResizeObserver(() => this.#showModel()).observe(document.body);
    addEventListener("hashchange", () => {
      const named = namedByAddress(this.#document?.models ?? []);
      if (named) this.#select(keyOf(named));
    });
  }

  /** What was not seen yet of the history; and the profile of the model that is looked at every other time, which changes slowly. */
  query() {
    this.#asked += 1;
    const after = `?after=${this.#points.at(-1)?.number ?? 0}`;
    const model = this.#document?.models.find((line) => keyOf(line) === this.#selected);
    if (model?.state !== "READY" || (this.#profile && this.#asked % 2)) return after;
    const query = `${after}&${new URLSearchParams({ model: model.name, version: model.version })}`;
    return query.length <= LONGEST_QUERY ? query : after; // the numbers must come whatever a model is called
  }

  take(page) {
    this.#key.show(false);
    this.#document = page;
    const { profile } = page;
    if (profile === null || (profile && keyOf(profile) === this.#selected)) this.#profile = profile;
    const fresh = page.history ?? [];
    const present = new Map();
    for (const model of page.models) {
      const known = this.#histories.get(keyOf(model));
      const history = known ?? new History(page.bounds);
      const points = known ? fresh : [...this.#points, ...fresh];
      for (const point of points) history.add(point.time, point.seconds, point.models[keyOf(model)]);
      present.set(keyOf(model), history);
    }
    this.#histories = present;
    this.#points = [...this.#points, ...fresh].slice(-KEPT_POINTS);
    this.#showServer();
    this.#choose();
    this.#showList();
    this.#showModel();
  }

  lost(times, status) {
    const state = find("server-state");
    setTone(state, "bad");
    this.#key.show(status === 401);
    const unknown = hasKey() ? "The server does not know this key" : "The server asks for a key";
    setText(state, status === 401 ? unknown : times > 1 ? "No answer. Trying again …" : "No answer");
  }

  #select(key) {
    if (!key || key === this.#selected) return;
    this.#selected = key;
    history.replaceState(null, "", `#${encodeURIComponent(key)}`);
    this.#profile = null;
    this.#showModel();
    askNow();
  }

  /** Keep what is selected while it is there; else the model that the address names, or the one most worth a look. */
  #choose() {
    const { models } = this.#document;
    if (models.some((model) => keyOf(model) === this.#selected)) return;
    const toneOf = (model) => health(model, this.#histories.get(keyOf(model)).window(RECENT_S), this.#document.bounds).tone;
    const best = namedByAddress(models) ?? worthALook(models, toneOf);
    this.#selected = best ? keyOf(best) : null;
    this.#profile = null;
  }

  #showServer() {
    const { server, models, clock } = this.#document;
    const state = find("server-state");
    const [text, tone] = serverState(server, models);
    setText(state, text);
    setTone(state, tone);
    setText(find("server-version"), server.version);
    setText(find("server-uptime"), duration(server.uptime_s));
    setText(find("server-connections"), String(server.connections));
    const before = this.#traffic;
    const seconds = before ? clock - before.clock : 0;
    const perSecond = (name) => (seconds > 0 ? `${bytes(Math.max(0, server[name] - before.server[name]) / seconds)}/s` : NOTHING);
    if (seconds > 0) {
      setText(find("server-in"), perSecond("bytes_received"));
      setText(find("server-out"), perSecond("bytes_sent"));
    }
    if (!before || seconds !== 0) this.#traffic = { clock, server };
  }

  #showList() {
    const { models, bounds, left_out: leftOut } = this.#document;
    const lines = models.map((model) => {
      const history = this.#histories.get(keyOf(model));
      const short = history.window(SHORT_S);
      const perSecond = short && model.state === "READY" && short.ok ? short.ok / short.seconds : null;
      return { model, health: health(model, history.window(RECENT_S), bounds), perSecond };
    });
    this.#list.show(lines, this.#selected, leftOut);
  }

  #showModel() {
    const page = this.#document;
    const model = page?.models.find((line) => keyOf(line) === this.#selected);
    if (!model) {
      if (page) showNoModel(page.server.serving);
      return;
    }
    const history = this.#histories.get(keyOf(model));
    const { span, seconds, end } = this.#time;
    this.#time.show(history.first, history.clock());
    const view = {
      model,
      history,
      bounds: page.bounds,
      slo: model.slo_ms ?? null,
      profile: model.state === "READY" ? this.#profile : null,
      span,
      seconds,
      end,
      latest: model.counts ?? null,
      short: history.window(SHORT_S, end),
      recent: history.window(seconds, end),
      minute: history.window(MINUTE_S, end),
    };
    showAbout(model, health(model, history.window(RECENT_S), page.bounds));
    this.#tiles.show(view);
    this.#rollout.show(view, (version) => this.#histories.get(keyOf({ name: model.name, version }))?.window(seconds, end) ?? null);
    this.#curve.show(view);
    this.#drift.show(view);
    this.#live.show(view);
    this.#senders.show(this.#points.findLast((point) => point.time <= end), model);
    this.#writing.show(view);
    this.#cache.show(view);
    this.#pipeline.show(view);
    this.#try.use(model);
  }
}

/** The model that the address names behind its #, as name or name/version; other such parts are places on the page. */
function namedByAddress(models) {
  try {
    const key = decodeURIComponent(location.hash.slice(1));
    const named = models.find((model) => keyOf(model) === key) ?? models.find((model) => model.name === key && model.newest);
    return named ?? null;
  } catch {
    return null; // an address that was cut
  }
}

function serverState(server, models) {
  if (!server.serving) return ["The engine is starting or being restarted", "warn"];
  const loading = models.filter((model) => model.state === "LOADING").length;
  if (server.loading) return [`${server.loading[0].toUpperCase()}${server.loading.slice(1)}`, "warn"];
  if (!server.ready) return [loading ? `Loading ${count(loading, "model")} …` : "Not ready", "warn"];
  return ["Ready", "good"];
}

function showAbout(model, state) {
  setText(find("model-title"), model.name);
  setText(find("model-version"), model.version ? `version ${model.version}` : "");
  const facts = model.platform ? [taskName(model.task), model.platform, promise(model)] : [state.why];
  if (model.max_batch) facts.push(`batches of up to ${model.max_batch}`);
  setText(find("model-facts"), facts.join(" · "));
  const trouble = model.reason || (["warn", "bad"].includes(state.tone) ? state.why : "");
  setText(find("model-trouble"), trouble);
  setTone(find("model-trouble"), state.tone);
}

function showNoModel(serving) {
  setText(find("model-title"), serving ? "No models" : "Starting");
  setText(find("model-version"), "");
  const empty = "This server has nothing to serve. Start it with the path of a model.";
  setText(find("model-facts"), serving ? empty : "Models appear as soon as the engine is up.");
  setText(find("model-trouble"), "");
}

offerThemes();
const page = new Console();
const askNow = poll(() => page.query(), (found) => page.take(found), (times, status) => page.lost(times, status));
