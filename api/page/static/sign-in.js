// @ts-check
// Says why signing in has failed, and where to go afterwards. The page works without it.
const asked = new URLSearchParams(location.search);
const said = {
  wrong: "This token is not known here, has expired, or was revoked.",
  wait: "Too many wrong tokens came. Try again in a minute.",
  empty: "Type or paste a token first.",
  ended: "Your session has ended. Sign in again.",
};
const why = document.getElementById("why");
if (why) why.textContent = said[/** @type {keyof typeof said} */ (asked.get("why") ?? "")] ?? "";
const next = document.getElementById("next");
// An address that was made for this reader has the token behind its #, where it is never sent.
const token = document.getElementById("token");
if (location.hash.length > 20 && token instanceof HTMLInputElement) {
  token.value = location.hash.slice(1);
  history.replaceState(null, "", location.pathname + location.search);
  token.form?.requestSubmit();
}
if (next instanceof HTMLInputElement) next.value = asked.get("next") ?? "/";
