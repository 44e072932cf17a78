// The line for a terminal that does what the page does.

const PLAIN = /^[A-Za-z0-9_@%+=:,./-]+$/;

export function shellQuoted(text) {
  return PLAIN.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

export const predictPath = (model) => `/models/${encodeURIComponent(model)}/predict`;

/** The key itself is never part of the line: it would end up in somebody's notes. */
const KEY = ' -H "Authorization: Bearer $CARPOOL_API_KEY"';

export function predictLine(origin, model, fileName, type, withKey = false) {
  const kind = shellQuoted(`Content-Type: ${type || "application/octet-stream"}`);
  return `curl -s ${shellQuoted(origin + predictPath(model))} -H ${kind}${withKey ? KEY : ""} --data-binary @${shellQuoted(fileName)}`;
}

export function metadataLine(origin, model, version, withKey = false) {
  const path = `/v2/models/${encodeURIComponent(model)}/versions/${encodeURIComponent(version)}`;
  return `curl -s ${shellQuoted(origin + path)}${withKey ? KEY : ""}`;
}
