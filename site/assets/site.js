/* What a page does beyond standing there: theme, copy buttons, outline, language switch, reading marks. No modules, no requests. */
(function () {
  "use strict";
  var settings = JSON.parse(document.getElementById("settings").textContent);
  var words = settings.words;
  var all = function (selector, root) { return Array.prototype.slice.call((root || document).querySelectorAll(selector)); };
  var one = function (selector) { return document.querySelector(selector); };

  /* Storage may be forbidden; then nothing is remembered and everything else works. */
  function load(name) { try { return localStorage.getItem("course." + name); } catch (e) { return null; } }
  function save(name, value) { try { localStorage.setItem("course." + name, value); } catch (e) { /* not remembered */ } }

  one(".theme").addEventListener("click", function () {
    var root = document.documentElement;
    var dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    save("theme", root.dataset.theme);
  });

  /* --- copying --- */
  function copy(text) {
    if (navigator.clipboard && navigator.clipboard.writeText) {
      return navigator.clipboard.writeText(text).catch(function () { return copyOldWay(text); });
    }
    return copyOldWay(text);
  }
  function copyOldWay(text) {
    var box = document.createElement("textarea");
    box.value = text;
    box.style.cssText = "position:fixed;opacity:0";
    document.body.appendChild(box);
    box.select();
    var worked = document.execCommand("copy");
    box.remove();
    return worked ? Promise.resolve() : Promise.reject(new Error("copy"));
  }
  all(".source").forEach(function (block) {
    var button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = words.copy;
    button.addEventListener("click", function () {
      var say = function (word) {
        button.textContent = word;
        setTimeout(function () { button.textContent = words.copy; }, 1600);
      };
      copy(block.querySelector("code").textContent + "\n").then(function () { say(words.copied); }, function () { say(words.failed); });
    });
    block.querySelector(".bar").appendChild(button);
  });

  /* A slider's track is filled up to its thumb; its other pictures come when the reader reaches for it. */
  all(".slider input").forEach(function (input) {
    var fetched = false;
    var fill = function () { input.style.setProperty("--at", input.value / input.max); };
    input.addEventListener("input", fill);
    fill();
    ["pointerenter", "focus"].forEach(function (event) {
      input.addEventListener(event, function () {
        if (fetched) return;
        fetched = true;
        input.dataset.frames.split("|").forEach(function (source) { new Image().src = source; });
      });
    });
  });

  /* Only what scrolls needs a stop for the Tab key. */
  function stops() {
    all("pre, .table, .math.display, .foreign").forEach(function (box) {
      if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0; else box.removeAttribute("tabindex");
    });
  }

  /* --- where the reader is: the outline, and the same place in the other language --- */
  var headings = all("main :is(h1, h2, h3, h4, h5)[id]");
  var marks = {};
  all(".outline a").forEach(function (link) { marks[decodeURIComponent(link.hash.slice(1))] = link; });
  var twin = one(".switch");
  var twinPage = twin.getAttribute("href").split("#")[0];
  function here() {
    var found = null;
    headings.forEach(function (heading) { if (heading.getBoundingClientRect().top < innerHeight * 0.3) found = heading; });
    if (headings.length && innerHeight + scrollY >= document.documentElement.scrollHeight - 2 && scrollY > 0) {
      found = headings.filter(function (h) { return h.getBoundingClientRect().top < innerHeight; }).pop() || found;
    }
    return found;
  }
  function follow() {
    var heading = here();
    var first = heading && heading.tagName === "H1";
    twin.href = twinPage + (heading && !first ? "#" + encodeURIComponent(heading.id) : "");
    var shown = null;
    headings.some(function (h) { if (marks[h.id]) shown = h.id; return h === heading; });
    Object.keys(marks).forEach(function (id) {
      var on = heading && !first && id === shown;
      marks[id].classList.toggle("here", on);
      if (on) marks[id].setAttribute("aria-current", "location"); else marks[id].removeAttribute("aria-current");
    });
  }
  var waiting = false;
  addEventListener("scroll", function () {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(function () { waiting = false; follow(); });
  }, { passive: true });
  addEventListener("hashchange", function () { open(); follow(); });

  /* A link into something folded unfolds it. */
  function open() {
    var target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (var box = target && target.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
  }

  var outline = one(".outline details");
  var wide = matchMedia("(min-width: 1120px)");
  if (outline) {
    wide.addEventListener("change", function () { outline.open = wide.matches; });
    outline.addEventListener("click", function (event) { if (event.target.closest("a") && !wide.matches) outline.open = false; });
  }
  var menu = one(".menu");
  document.addEventListener("click", function (event) { if (menu.open && !menu.contains(event.target)) menu.open = false; });
  document.addEventListener("keydown", function (event) {
    if (event.key === "Escape" && menu.open) { menu.open = false; menu.querySelector("summary").focus(); }
  });

  /* --- chapters read: kept on this device, the same for both languages --- */
  function readList() {
    var list;
    try { list = JSON.parse(load("read") || "[]"); } catch (e) { list = []; }
    return Array.isArray(list) ? list : [];
  }
  function show() {
    var list = readList();
    all("[data-chapter]").forEach(function (item) { item.classList.toggle("read", list.indexOf(item.dataset.chapter) >= 0); });
    var button = one(".mark");
    if (button) {
      var on = list.indexOf(settings.chapter) >= 0;
      button.setAttribute("aria-pressed", String(on));
      button.textContent = on ? words.marked : words.mark;
    }
    var rows = all(".rows [data-chapter]");
    if (rows.length && one(".progress")) {
      var count = rows.filter(function (row) { return row.classList.contains("read"); }).length;
      one(".progress .said").textContent = words.read.replace("{count}", count).replace("{total}", rows.length);
      one(".meter span").style.width = (100 * count) / rows.length + "%";
      var last = rows.filter(function (row) { return row.dataset.chapter === load("last"); })[0];
      var goOn = one(".go-on");
      goOn.hidden = !last;
      if (last) {
        goOn.href = last.querySelector("a").getAttribute("href");
        goOn.querySelector("span").textContent = last.querySelector("a").textContent;
      }
    }
  }
  if (one(".mark")) {
    one(".mark").addEventListener("click", function () {
      var list = readList().filter(function (name) { return name !== settings.chapter; });
      if (this.getAttribute("aria-pressed") !== "true") list.push(settings.chapter);
      save("read", JSON.stringify(list));
      show();
    });
  }
  if (settings.chapter) save("last", settings.chapter);
  addEventListener("storage", show);
  addEventListener("pageshow", show);

  show();
  open();
  follow();
  stops();
  addEventListener("resize", stops);
  document.addEventListener("toggle", stops, true);
  document.documentElement.dataset.ready = "true";
})();
