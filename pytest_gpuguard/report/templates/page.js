"use strict";
(function () {
  var root = document.documentElement;
  root.classList.add("js");
  var claims = Array.prototype.slice.call(document.querySelectorAll("details.claim"));
  var search = document.getElementById("search");
  var chips = Array.prototype.slice.call(document.querySelectorAll("button[data-only]"));
  var count = document.getElementById("count");
  var theme = document.getElementById("theme");

  function dark() {
    var set = root.getAttribute("data-theme");
    return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }
  function named() { theme.textContent = dark() ? "Light" : "Dark"; }
  function remembered(value) {
    // A page from a file may be refused its storage.
    try {
      if (value) { localStorage.setItem("gpuguard-theme", value); }
      return localStorage.getItem("gpuguard-theme");
    } catch (refused) { return null; }
  }
  var before = remembered(null);
  if (before === "dark" || before === "light") { root.setAttribute("data-theme", before); }
  named();
  theme.addEventListener("click", function () {
    var next = dark() ? "light" : "dark";
    root.setAttribute("data-theme", next);
    remembered(next);
    named();
  });

  function filter() {
    var words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    var wanted = {};
    chips.forEach(function (chip) { wanted[chip.dataset.only] = chip.getAttribute("aria-pressed") === "true"; });
    var shown = 0;
    claims.forEach(function (claim) {
      var text = claim.firstElementChild.textContent.toLowerCase();
      var kept = wanted[claim.dataset.verdict] !== false && words.every(function (word) { return text.indexOf(word) >= 0; });
      claim.hidden = !kept;
      shown += kept ? 1 : 0;
    });
    count.textContent = shown + " of " + claims.length;
  }
  if (search) {
    search.addEventListener("input", filter);
    chips.forEach(function (chip) {
      chip.addEventListener("click", function () {
        chip.setAttribute("aria-pressed", chip.getAttribute("aria-pressed") === "true" ? "false" : "true");
        filter();
      });
    });
    document.getElementById("expand").addEventListener("click", function () {
      var shown = claims.filter(function (claim) { return !claim.hidden; });
      var open = shown.some(function (claim) { return !claim.open; });
      shown.forEach(function (claim) { claim.open = open; });
    });
    filter();
  }

  function follow() {
    var target = location.hash.length > 1 ? document.getElementById(location.hash.slice(1)) : null;
    if (target && target.tagName === "DETAILS") { target.hidden = false; target.open = true; target.scrollIntoView(); }
  }
  addEventListener("hashchange", follow);
  follow();
})();
