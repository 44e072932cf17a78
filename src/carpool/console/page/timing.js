// Where the time of one request went: the server says its part in Server-Timing, the rest is the way there and back.

const PARTS = [
  ["decode", "Decode"],
  ["queue", "Wait"],
  ["infer", "Model"],
  ["post", "Answer"],
];

/** `decode;dur=0.061, queue;dur=3.2, batch;desc="17"` as numbers; what is missing is absent. */
export function parseServerTiming(header) {
  const found = {};
  for (const entry of (header ?? "").split(",")) {
    const [name, ...parameters] = entry.split(";").map((part) => part.trim());
    for (const parameter of parameters) {
      const [key, value = ""] = parameter.split("=", 2).map((part) => part.trim());
      const number = Number.parseFloat(value.replaceAll('"', ""));
      const wanted = name === "batch" ? key === "desc" : key === "dur";
      if (wanted && Number.isFinite(number) && number >= 0) found[name] = number;
    }
  }
  return found;
}

/** The parts in order, each with its share of the whole. A clock that disagrees never makes a part negative. */
export function breakdown(totalMs, timing) {
  const parts = PARTS.filter(([name]) => timing[name] !== undefined).map(([name, label]) => ({
    name,
    label,
    ms: timing[name],
  }));
  const server = parts.reduce((sum, part) => sum + part.ms, 0);
  parts.push({ name: "network", label: "Network", ms: Math.max(0, totalMs - server) });
  const whole = Math.max(totalMs, server) || 1;
  return { server, parts: parts.map((part) => ({ ...part, share: part.ms / whole })) };
}
