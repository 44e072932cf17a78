// The four ways a picture comes in: chosen, dropped, pasted, or the sample.

import { find } from "./dom.js";

const SAMPLE = "/console/sample.jpg";

/** `onPicture` gets a file; `onOther` is told that what came was no picture. */
export function takePictures(onPicture, onOther) {
  const take = (file) => {
    if (!file) return;
    if (file.type && !file.type.startsWith("image/")) onOther();
    else onPicture(file);
  };
  const input = find("file");
  input.addEventListener("change", () => {
    take(input.files[0]);
    input.value = ""; // the same file can be chosen again
  });
  document.addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])].find((item) => item.type.startsWith("image/"));
    if (file) take(file);
  });
  takeDrops(take);
  offerSample(take);
}

function takeDrops(take) {
  const stage = find("stage");
  let inside = 0; // enter and leave are told for every child as well
  const hover = (change) => {
    inside = Math.max(0, inside + change);
    stage.classList.toggle("over", inside > 0);
  };
  // Anywhere on the page: a drop that nobody takes would make the browser leave it.
  document.addEventListener("dragenter", () => hover(1));
  document.addEventListener("dragleave", () => hover(-1));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    hover(-inside);
    take(event.dataTransfer?.files[0]);
  });
}

async function offerSample(take) {
  const button = find("sample");
  try {
    button.hidden = !(await fetch(SAMPLE, { method: "HEAD" })).ok;
  } catch {
    return; // no server, no sample
  }
  button.addEventListener("click", async () => {
    try {
      const blob = await (await fetch(SAMPLE)).blob();
      take(new File([blob], "sample.jpg", { type: "image/jpeg" }));
    } catch {
      button.hidden = true;
    }
  });
}
