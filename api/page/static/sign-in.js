// @ts-check
// Says why signing in has failed, which ways there are, and where to go afterwards. With a token the page works without it.
const asked = new URLSearchParams(location.search);
const said = {
  wrong: "This is not known here, has expired, or was revoked.",
  wait: "Too many wrong answers came. Try again in a minute.",
  empty: "Type or paste a token first.",
  ended: "Your session has ended. Sign in again.",
  role: "Your identity provider gives you no role here. Ask an administrator which groups it takes.",
  away: "The identity provider cannot be reached, or is not as [oidc] says. The coordinator's log says more.",
  refused: "The identity provider has not let you in.",
  lost: "This browser has asked for nothing, or too long ago. Begin again.",
};
const why = document.getElementById("why");
if (why) why.textContent = said[/** @type {keyof typeof said} */ (asked.get("why") ?? "")] ?? "";
const next = document.getElementById("next");
// Nothing but a path of this page, whoever made the address.
const wanted = new URL(asked.get("next") ?? "/", location.origin);
const onwards = wanted.origin === location.origin ? wanted.pathname + wanted.search : "/";
if (next instanceof HTMLInputElement) next.value = onwards;
// An address that was made for this reader has the token behind its #, where it is never sent.
const token = document.getElementById("token");
if (location.hash.length > 20 && token instanceof HTMLInputElement) {
  token.value = location.hash.slice(1);
  history.replaceState(null, "", location.pathname + location.search);
  token.form?.requestSubmit();
} else if (asked.get("why") === "done") {
  // The provider has sent us here, and a session has begun.
  location.replace(onwards);
} else {
  const provider = document.getElementById("provider");
  const ways = await (await fetch("/api/sign-in", { cache: "no-store" })).json();
  if (provider && ways.provider) {
    provider.querySelector("a")?.setAttribute("href", `/sign-in/provider?next=${encodeURIComponent(onwards)}`);
    provider.hidden = false;
  }
}
export {};
