// Runs before the first paint, so that a page which was made dark never flashes white.
{
  let kept = null;
  try {
    kept = localStorage.getItem("carpool-theme");
  } catch {
    // Storage can be switched off; the system's own choice is a good one.
  }
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
}
