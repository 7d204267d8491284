/* Full-text search that works from disk: the index is a script that sets a global, loaded when the box first opens. */
(function () {
  "use strict";
  var settings = JSON.parse(document.getElementById("settings").textContent);
  var words = settings.words;
  var own = settings.language;
  var other = own === "zh" ? "en" : "zh";
  var SHOWN = 30, AROUND = 60;
  var dialog = document.querySelector(".finder");
  var input = dialog.querySelector("input");
  var list = document.getElementById("found");
  var status = dialog.querySelector(".status");
  var index = null, chosen = -1, composing = false;

  function fold(text) { return text.toLowerCase(); }

  function prepare() {
    index = window.SITE_INDEX.entries.map(function (entry) {
      var texts = entry[2], mine = texts[own] || ["", ""], theirs = texts[other] || ["", ""];
      var fields = [[mine[0], 60], [mine[1], 12], [entry[3], 8], [theirs[0], 30], [theirs[1], 3]];
      return {
        page: window.SITE_INDEX.pages[entry[0]], anchor: entry[1], title: mine[0] || theirs[0],
        fields: fields.map(function (field) { return { text: field[0], folded: fold(field[0]), weight: field[1] }; })
      };
    });
    if (!composing) search();
  }
  function load() {
    if (index || document.getElementById("index-script")) return;
    status.textContent = words.loading;
    var script = document.createElement("script");
    script.id = "index-script";
    script.src = settings.up + "assets/search-index.js";
    script.onload = prepare;
    document.head.appendChild(script);
  }

  /* Every word must be somewhere in the section; where it is decides the rank. */
  function score(entry, terms) {
    var total = 0;
    for (var i = 0; i < terms.length; i++) {
      var best = 0;
      entry.fields.forEach(function (field) {
        if (field.weight > best && field.folded.indexOf(terms[i]) >= 0) best = field.weight;
      });
      if (!best) return 0;
      total += best;
    }
    if (entry.fields[0].folded === terms.join(" ")) total += 50;
    return total + (entry.page[1] === "chapter" ? 2 : 0);
  }

  function find(query) {
    var terms = fold(query.normalize("NFKC")).split(/\s+/).filter(Boolean);
    if (!terms.length) return { terms: terms, hits: [] };
    var hits = index
      .map(function (entry, place) { return { entry: entry, place: place, score: score(entry, terms) }; })
      .filter(function (hit) { return hit.score > 0; })
      .sort(function (a, b) { return b.score - a.score || a.place - b.place; });
    return { terms: terms, hits: hits };
  }

  /* The field that holds most of the words, cut around the first of them. */
  function snippet(entry, terms) {
    var best = null, most = 0;
    [1, 2, 4].forEach(function (which) {
      var field = entry.fields[which];
      var held = terms.filter(function (term) { return field.folded.indexOf(term) >= 0; }).length;
      if (held > most) { most = held; best = field; }
    });
    if (!best) { /* only titles hold them: the other language's, if not this one's */
      var title = terms.some(function (term) { return entry.fields[0].folded.indexOf(term) >= 0; }) ? "" : entry.fields[3].text + " · ";
      return title + entry.fields[1].text.slice(0, 2 * AROUND);
    }
    var at = Math.min.apply(null, terms.map(function (term) { return best.folded.indexOf(term); }).filter(function (n) { return n >= 0; }));
    var start = Math.max(0, at - AROUND), end = Math.min(best.text.length, at + 2 * AROUND);
    return (start ? "…" : "") + best.text.slice(start, end) + (end < best.text.length ? "…" : "");
  }

  /* Text into an element with the words marked; never as HTML. */
  function marked(parent, text, terms) {
    var folded = fold(text), at = 0;
    while (at < text.length) {
      var next = -1, length = 0;
      terms.forEach(function (term) {
        var found = folded.indexOf(term, at);
        if (found >= 0 && (next < 0 || found < next || (found === next && term.length > length))) { next = found; length = term.length; }
      });
      if (next < 0) break;
      parent.appendChild(document.createTextNode(text.slice(at, next)));
      var mark = document.createElement("mark");
      mark.textContent = text.slice(next, next + length);
      parent.appendChild(mark);
      at = next + length;
    }
    parent.appendChild(document.createTextNode(text.slice(at)));
  }

  function row(hit, terms, place) {
    var entry = hit.entry, titles = entry.page[2];
    var link = document.createElement("a");
    var page = titles[own] ? own : other;
    link.href = settings.up + page + "/" + entry.page[0] + ".html" + (entry.anchor ? "#" + encodeURIComponent(entry.anchor) : "");
    link.setAttribute("role", "option");
    link.id = "hit-" + place;
    link.tabIndex = -1;
    link.setAttribute("aria-selected", "false");
    [["where", titles[own] || titles[other]], ["head", entry.title], ["text", snippet(entry, terms)]].forEach(function (part) {
      var line = document.createElement("span");
      line.className = part[0];
      marked(line, part[1], part[0] === "where" ? [] : terms);
      link.appendChild(line);
    });
    link.addEventListener("mousemove", function () { choose(place); });
    link.addEventListener("click", function () { dialog.close(); });
    return link;
  }

  function search() {
    if (!index) return;
    var query = input.value.trim();
    list.textContent = "";
    chosen = -1;
    input.removeAttribute("aria-activedescendant");
    if (!query) { status.textContent = words.hint; input.setAttribute("aria-expanded", "false"); return; }
    var result = find(query), count = result.hits.length, shown = Math.min(count, SHOWN);
    result.hits.slice(0, SHOWN).forEach(function (hit, place) { list.appendChild(row(hit, result.terms, place)); });
    var said = !count ? words.empty : count > shown ? words.more : words.count;
    status.textContent = said.replace("{query}", query).replace("{count}", count).replace("{shown}", shown);
    input.setAttribute("aria-expanded", String(count > 0));
    list.scrollTop = 0;
    if (count) choose(0);
  }

  function choose(place) {
    var rows = list.children;
    if (!rows.length) return;
    if (rows[chosen]) rows[chosen].setAttribute("aria-selected", "false");
    chosen = (place + rows.length) % rows.length;
    rows[chosen].setAttribute("aria-selected", "true");
    rows[chosen].scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", rows[chosen].id);
  }

  function show() { load(); if (!dialog.open) dialog.showModal(); input.focus(); input.select(); if (index) search(); }

  document.querySelector(".search-open").addEventListener("click", show);
  document.addEventListener("keydown", function (event) {
    var typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || event.target.isContentEditable;
    var slash = event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey;
    if (slash || (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey))) { event.preventDefault(); show(); }
  });
  dialog.addEventListener("click", function (event) { if (event.target === dialog) dialog.close(); });

  /* While an input method composes, the box holds half-typed letters: wait for the finished word. */
  input.addEventListener("compositionstart", function () { composing = true; });
  input.addEventListener("compositionend", function () { composing = false; search(); });
  input.addEventListener("input", function (event) { if (!composing && !event.isComposing) search(); });
  input.addEventListener("keydown", function (event) {
    if (composing || event.isComposing || event.keyCode === 229) return;
    if (event.key === "ArrowDown") { event.preventDefault(); choose(chosen + 1); }
    else if (event.key === "ArrowUp") { event.preventDefault(); choose(chosen - 1); }
    else if (event.key === "Escape") { event.preventDefault(); dialog.close(); }
    else if (event.key === "Enter") { event.preventDefault(); if (list.children[chosen]) list.children[chosen].click(); }
  });
  window.SITE_SEARCH = { find: function (query) { return find(query).hits; } };
})();
