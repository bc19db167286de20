"use strict";
(() => {
  const verdict = JSON.parse(document.getElementById("verdict").textContent);
  const SHOWN = 1000; // rows of a table at first; more on demand

  // ---------------------------------------------------------------- elements

  // Text goes into text nodes only, so that a name cannot become markup.
  function build(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    for (const child of children.flat(Infinity)) {
      if (child !== null && child !== undefined) element.append(child);
    }
    return element;
  }
  const el = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) =>
    build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  const sections = document.getElementById("sections");
  const links = el("nav", { "aria-label": "Sections" });
  function section(id, title, ...children) {
    const made = el("section", { id, "aria-labelledby": id + "-title" }, el("h2", { id: id + "-title" }, title), ...children);
    sections.append(made);
    links.append(el("a", { href: "#" + id }, title));
    return made;
  }

  // ---------------------------------------------------------------- numbers and names

  const value = (x) => (x === null || x === undefined ? null : Number(x)); // "NaN" and "Infinity" too
  function show(x) {
    if (x === null) return "–";
    if (Number.isNaN(x)) return "NaN";
    if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
    if (x === 0) return "0";
    const size = Math.abs(x);
    if (size >= 0.001 && size < 10000) return String(Number(x.toPrecision(3)));
    return x.toExponential(1).replace("e+", "e");
  }
  const glyph = (passed) =>
    el("span", { class: "glyph " + (passed ? "good" : "bad"), title: passed ? "holds" : "fails" }, passed ? "✓" : "✗");
  const pathName = (path) => path || "(the model itself)";
  const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

  const nameOf = (row) => (row.name.startsWith("#") ? "(model)" : "") + (row.name || "(output)");
  const rungNames = verdict.rungs.filter((rung) => rung.passed !== null).map((rung) => rung.name);
  const zeros = new Set(verdict.structural_zeros);
  const rows = verdict.rungs.flatMap((rung, rungIndex) =>
    rung.rows.map((row) => {
      const m = row.measures || {};
      const largest = value(m.largest);
      const allowed = value(row.allowed);
      const judged = value(row.judged);
      // What is zero by structure has no magnitude to be relative to.
      const noise = row.passed && zeros.has(row.name);
      const over = (x) => (x === null || largest === null || noise ? null : x === 0 ? 0 : x / largest);
      return {
        rung: rung.name, rungIndex, name: nameOf(row), path: row.path, passed: row.passed, detail: row.detail,
        relative: value(m.relative), max_abs: value(m.max_abs), ulp: value(m.ulp), rms: value(m.rms),
        cosine: m.cosine === undefined ? null : Math.max(0, 1 - Number(m.cosine)),
        allowed,
        used: judged === null || allowed === null ? null : judged === 0 ? 0 : judged / allowed,
        // What fails without a value to judge, such as a missing call or a NaN, is off every scale.
        error: judged !== null ? over(judged) : row.passed ? over(value(m.max_abs)) : NaN,
        limit: over(allowed),
      };
    })
  );
  rows.forEach((row, index) => (row.index = index + 1));
  const failed = rows.filter((row) => !row.passed);

  // ---------------------------------------------------------------- the head

  function drawHead() {
    const first = verdict.first_divergence;
    const sides = Object.entries(verdict.provenance).map(([side, how]) => `${side}: ${how.framework || "unknown"}`);
    document.title = `Parity: ${verdict.passed ? "passed" : "diverged"}`;
    document.getElementById("head").append(
      el("div", { class: "banner " + (verdict.passed ? "passed" : "diverged"), id: "banner" },
        el("span", { class: "glyph", "aria-hidden": "true" }, verdict.passed ? "✓" : "✗"),
        el("div", {},
          el("h1", {}, verdict.passed ? "PASSED" : "DIVERGED"),
          el("p", {}, verdict.passed
            ? `All ${plural(rows.length, "check")} on ${plural(rungNames.length, "rung")} hold.`
            : `${plural(failed.length, "check")} of ${rows.length.toLocaleString("en")} ${failed.length === 1 ? "does" : "do"} not hold.`),
          el("p", { class: "muted" }, [verdict.rule, ...sides].join(" · ")))),
      links
    );
    if (first) {
      section("first", "Where to look first",
        el("dl", { class: "first" },
          el("dt", {}, "rung"), el("dd", {}, first.rung),
          el("dt", {}, "module"), el("dd", { class: "name" }, pathName(first.path)),
          el("dt", {}, "quantity"), el("dd", { class: "name" }, nameOf(first)),
          el("dt", {}, "finding"), el("dd", {}, first.detail)),
        el("p", { class: "note" }, "Rungs are read from the top: what fails on a later rung, or later on this one, is usually the echo of this."),
        el("button", { id: "show-first", onclick: () => table.reveal(failed[0]) }, "Show it among the checks"));
    }
  }

  // ---------------------------------------------------------------- the ladder

  function drawLadder() {
    const ladder = el("div", { class: "ladder" });
    verdict.rungs.forEach((rung) => {
      if (rung.passed === null) {
        ladder.append(el("span", { class: "muted" }, "·"), el("span", { class: "muted" }, rung.name),
          el("span", { class: "muted count" }, "–"), el("span", { class: "track empty" }),
          el("span", { class: "muted meaning" }, "nothing was recorded that could be compared"));
        return;
      }
      const held = rung.rows.filter((row) => row.passed).length;
      const bar = el("i");
      bar.style.width = `${(100 * held) / Math.max(1, rung.rows.length)}%`;
      ladder.append(
        glyph(rung.passed),
        el("span", {}, el("button", { class: "link", title: "Show this rung among the checks", onclick: () => table.showRung(rung.name) }, rung.name)),
        el("span", { class: "count" }, `${held} of ${rung.rows.length}`),
        el("span", { class: "track", "aria-hidden": "true" }, bar),
        el("span", { class: "meaning" }, rung.meaning));
    });
    section("ladder", "The ladder", ladder);
  }

  // ---------------------------------------------------------------- the tree of modules

  function treeOf(chosen) {
    const make = (path, name) => ({ path, name, children: new Map(), own: null, rows: 0, failed: 0 });
    const root = make("", "(the model itself)");
    for (const row of rows) {
      let node = root;
      const parts = row.path === "" ? [] : row.path.split(".");
      parts.forEach((part, depth) => {
        if (!node.children.has(part)) node.children.set(part, make(parts.slice(0, depth + 1).join("."), part));
        node = node.children.get(part);
      });
      if (chosen !== "" && chosen !== row.rung) continue;
      node.rows += 1;
      node.failed += row.passed ? 0 : 1;
      if (row.error !== null) node.own = worse(node.own, row.error);
    }
    const order = []; // parents before children
    const stack = [root];
    while (stack.length) {
      const node = stack.pop();
      order.push(node);
      stack.push(...node.children.values());
    }
    for (const node of order.reverse()) {
      node.worst = node.own;
      node.within = node.failed;
      node.all = node.rows;
      for (const child of node.children.values()) {
        node.worst = worse(node.worst, child.worst);
        node.within += child.within;
        node.all += child.all;
      }
    }
    return root;
  }
  function worse(a, b) {
    if (a === null || b === null) return a === null ? b : a;
    return Number.isNaN(a) || Number.isNaN(b) ? NaN : Math.max(a, b);
  }

  function drawTree() {
    const first = verdict.first_divergence;
    const host = el("div", { class: "tree", id: "tree" });
    const scale = el("span", { class: "scale" });
    const choice = el("select", { id: "tree-rung", onchange: draw },
      el("option", { value: "" }, "all rungs"), rungNames.map((name) => el("option", { value: name }, name)));
    choice.value = first ? first.rung : rungNames.includes("modules") ? "modules" : "";

    function draw() {
      const root = treeOf(choice.value);
      const errors = rows.filter((row) => choice.value === "" || row.rung === choice.value).map((row) => row.error)
        .filter((error) => error !== null && error > 0 && Number.isFinite(error)).map(Math.log10);
      const low = Math.floor(errors.reduce((a, b) => Math.min(a, b), errors.length ? errors[0] : -17));
      const high = Math.max(low + 3, Math.ceil(errors.reduce((a, b) => Math.max(a, b), low)));
      const cell = (error, title) => {
        if (error === null) return el("span", { class: "error muted" }, "–");
        const swatch = el("i", { class: "swatch", title });
        const part = error === 0 ? 0 : Number.isFinite(error) ? (Math.log10(error) - low) / (high - low) : 1;
        swatch.style.background = `color-mix(in oklab, var(--high) ${100 * Math.min(1, Math.max(0, part))}%, var(--low))`;
        return el("span", { class: "error" }, swatch, Number.isNaN(error) ? "✗" : show(error));
      };
      const line = (node) => [
        el("span", { class: node.children.size ? "twist" : "", "aria-hidden": "true" }),
        el("span", {}, el("span", { class: "name" + (node.failed ? " bad" : "") }, node.name),
          first && first.path === node.path ? el("span", { class: "tag" }, "look here first") : null),
        cell(node.own, "the worst relative error of this module"),
        cell(node.worst, "the worst relative error of this module and all within it"),
        node.all === 0 ? el("span", { class: "muted" }, "–")
          : el("button", { class: "link" + (node.within ? " bad" : ""), title: "Show the checks of this module and all within it",
            onclick: (event) => { event.preventDefault(); table.showModule(node.path, choice.value); } },
          node.within ? `✗ ${node.within} of ${plural(node.all, "check")}` : plural(node.all, "check")),
      ];
      const render = (node, depth) => {
        if (!node.children.size) return el("div", { class: "line", "data-path": node.path }, line(node));
        const open = depth < 1 || node.children.size + depth < 8 || (node.within > node.failed && depth < 4);
        return el("details", { open, "data-path": node.path },
          el("summary", { class: "line" }, line(node)),
          el("div", { class: "inner" }, [...node.children.values()].map((child) => render(child, depth + 1))));
      };
      host.replaceChildren(el("div", { class: "branch" },
        el("div", { class: "line titles" }, el("span"), el("span", {}, "module"), el("span", {}, "itself"), el("span", {}, "with all in it"), el("span", {}, "checks")),
        render(root, 0)));
      scale.hidden = root.worst === null;
      scale.replaceChildren("relative error ", show(10 ** low), el("i", { "aria-hidden": "true" }), show(10 ** high));
    }
    const openAll = (open) => () => host.querySelectorAll("details").forEach((details) => (details.open = open));
    draw();
    section("modules", "Modules",
      el("p", { class: "note" }, "The worst relative error of each module, and of it with all within it. In red: a check of this module fails."),
      el("div", { class: "controls" },
        el("label", {}, "checks of", choice),
        el("button", { id: "expand", onclick: openAll(true) }, "Expand all"),
        el("button", { id: "collapse", onclick: openAll(false) }, "Collapse all"), scale),
      host);
  }

  // ---------------------------------------------------------------- plots

  const redraws = [];
  function plot(host, draw) {
    const redraw = () => host.replaceChildren(draw(Math.max(320, host.clientWidth || 900)));
    redraws.push(redraw);
    redraw();
  }
  let waiting = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => redraws.forEach((redraw) => redraw()));
  });

  // A logarithmic axis that has a place for 0, and for what is no number.
  function logAxis(values, top, bottom, left, right) {
    const logs = values.filter((x) => x > 0 && Number.isFinite(x)).map(Math.log10);
    const low = Math.floor(logs.reduce((a, b) => Math.min(a, b), logs.length ? logs[0] : -16) - 0.2);
    const high = Math.max(low + 2, Math.ceil(logs.reduce((a, b) => Math.max(a, b), low) + 0.2));
    const zeros = values.some((x) => x === 0);
    const wild = values.some((x) => !Number.isFinite(x));
    const floor = bottom - (zeros ? 22 : 0);
    const ceiling = top + (wild ? 22 : 0);
    const of = (log) => floor - ((log - low) / (high - low)) * (floor - ceiling);
    const y = (x) => (x === 0 ? bottom - 4 : Number.isFinite(x) ? of(Math.log10(x)) : top + 4);
    const step = Math.ceil((high - low) / 7);
    const marks = [];
    const mark = (height, text, kind) => marks.push(svg("line", { class: kind, x1: left, x2: right, y1: height, y2: height }),
      svg("text", { x: left - 8, y: height + 4, "text-anchor": "end" }, text));
    for (let log = low; log <= high; log += step) mark(of(log), log === 0 ? "1" : `1e${log}`, "grid");
    if (zeros) mark(y(0), "0", "rail");
    if (wild) mark(y(Infinity), "no number", "rail");
    return { y, marks };
  }

  function drawErrors() {
    const order = { modules: "in order of execution", backward: "as the backward pass comes by",
      gradients: "as the backward pass comes by", updates: "as the backward pass comes by", training: "as the backward pass comes by" };
    const shown = Object.keys(order).filter((name) => rows.filter((row) => row.rung === name && row.error !== null).length > 1);
    if (!shown.length) return;
    const host = section("errors", "Errors along the model",
      el("p", { class: "note" }, "Every quantity's error over its largest magnitude, on a logarithmic scale: for float64 the largest difference, for float32 the root mean square error against the float64 truth. A click on a point leads to its check."),
      el("div", { class: "legend" },
        el("span", {}, svg("svg", { viewBox: "0 0 28 12" }, svg("circle", { class: "point", cx: 14, cy: 6, r: 3.5 })), "holds"),
        el("span", {}, svg("svg", { viewBox: "0 0 28 12" }, svg("path", { class: "cross", d: "M10 2l8 8m0-8l-8 8" })), "fails"),
        el("span", {}, svg("svg", { viewBox: "0 0 28 12" }, svg("path", { class: "limit", d: "M0 6h28" })), "allowed")));
    for (const name of shown) {
      const points = rows.filter((row) => row.rung === name && row.error !== null);
      const figure = el("figure", {});
      host.append(el("h3", {}, `${name}, ${order[name]}`), figure);
      plot(figure, (width) => errorPlot(points, width, name));
    }
  }

  const tail = (text, most) => (text.length > most ? "…" + text.slice(1 - most) : text);

  function errorPlot(points, width, title) {
    const left = 90, right = width - 12, top = 10, bottom = 200;
    const slot = (right - left) / points.length;
    const named = slot > 20 && points.length <= 40;
    const longest = Math.max(...points.map((row) => Math.min(30, row.name.length)));
    const height = bottom + (named ? 30 + 5 * longest : 30);
    const limits = points.map((row) => row.limit).filter((limit) => limit !== null && limit > 0);
    const axis = logAxis([...points.map((row) => row.error), ...limits], top, bottom, left, right);
    const x = (place) => left + (place + 0.5) * slot;
    const marks = [];
    let limit = "", last = null;
    points.forEach((row, place) => {
      const at = [x(place), axis.y(row.error)];
      if (row.limit !== null && row.limit > 0 && Number.isFinite(row.limit)) {
        const height = axis.y(row.limit).toFixed(1);
        limit += last === null ? `M${left + place * slot} ${height}` : last === height ? "" : `V${height}`;
        limit += `H${(left + (place + 1) * slot).toFixed(1)}`;
        last = height;
      } else last = null;
      const title = svg("title", {}, `${row.name}: ${show(row.error)} of the scale, allowed ${show(row.limit)}. ${row.detail}`);
      const size = points.length > 400 ? 2 : 3.5;
      const onclick = () => table.reveal(row);
      marks.push(row.passed
        ? svg("circle", { class: "point", cx: at[0], cy: at[1], r: size, onclick }, title)
        : svg("path", { class: "cross", d: `M${at[0] - 4} ${at[1] - 4}l8 8m0 -8l-8 8`, onclick }, title));
      if (named) {
        const transform = `translate(${at[0] + 4} ${bottom + 16}) rotate(-45)`;
        marks.push(svg("text", { "text-anchor": "end", transform }, tail(row.name, 30)));
      }
    });
    if (!named) {
      const most = Math.floor((right - left) / 16); // so that both ends have room
      marks.push(svg("text", { x: left, y: bottom + 20 }, tail(points[0].name, most)),
        svg("text", { x: right, y: bottom + 20, "text-anchor": "end" }, tail(points[points.length - 1].name, most)));
    }
    const label = `${title}: ${plural(points.length, "error")}, ${points.filter((row) => !row.passed).length} of them fail`;
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, axis.marks, svg("path", { class: "limit", d: limit }), marks);
  }

  // ---------------------------------------------------------------- training

  function drawTraining() {
    const curves = Object.entries(verdict.curves).map(([name, losses]) => ({ name, losses: losses.map(value) }));
    if (!curves.length || Math.max(...curves.map((curve) => curve.losses.length)) < 2) return;
    const styles = [["var(--accent)", ""], ["var(--second)", "7 4"], ["var(--third)", "2 3"], ["var(--fourth)", "12 3 2 3"]];
    curves.forEach((curve, place) => {
      [curve.colour, curve.dashes] = styles[Math.min(place, 3)];
    });
    const truth = curves.find((curve) => curve.name.startsWith("truth")) || curves[0];
    const differences = curves.filter((curve) => curve !== truth).map((curve) => ({
      ...curve, losses: curve.losses.map((loss, step) => Math.abs(loss - truth.losses[step])),
    }));
    const legend = (list) => el("div", { class: "legend" }, list.map((curve) => {
      const line = svg("path", { class: "curve", d: "M0 6h28", "stroke-dasharray": curve.dashes });
      line.style.stroke = curve.colour;
      return el("span", {}, svg("svg", { viewBox: "0 0 28 12" }, line), curve.name);
    }));
    const above = el("figure", {}), below = el("figure", {});
    const steps = Math.max(...curves.map((curve) => curve.losses.length));
    section("training", "Training run",
      el("p", { class: "note" }, `The loss before each of ${plural(steps, "step")}, and how far the runs are apart.`),
      el("h3", {}, "loss"), legend(curves), above,
      el("h3", {}, `difference from the ${truth.name}`), legend(differences), below);
    plot(above, (width) => curvePlot(curves, width, linearAxis, "losses of all runs"));
    plot(below, (width) => curvePlot(differences, width, logAxis, "differences of the losses"));
  }

  function linearAxis(values, top, bottom, left, right) {
    const finite = values.filter(Number.isFinite);
    let low = finite.reduce((a, b) => Math.min(a, b), finite.length ? finite[0] : 0);
    let high = finite.reduce((a, b) => Math.max(a, b), low);
    const wanted = (high - low || Math.abs(high) || 1) / 5;
    const power = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= wanted);
    low = Math.floor(low / step) * step;
    high = Math.max(low + step, Math.ceil(high / step) * step);
    const y = (x) => bottom - ((x - low) / (high - low)) * (bottom - top);
    const marks = [];
    for (let at = low; at <= high + step / 2; at += step) {
      marks.push(svg("line", { class: "grid", x1: left, x2: right, y1: y(at), y2: y(at) }),
        svg("text", { x: left - 8, y: y(at) + 4, "text-anchor": "end" }, String(Number(at.toPrecision(6)))));
    }
    return { y, marks };
  }

  function curvePlot(curves, width, makeAxis, label) {
    const left = 76, right = width - 12, top = 10, bottom = 200;
    const axis = makeAxis(curves.flatMap((curve) => curve.losses).filter(Number.isFinite), top, bottom, left, right);
    const steps = Math.max(...curves.map((curve) => curve.losses.length));
    const x = (step) => left + ((right - left) * step) / Math.max(1, steps - 1);
    // Reference and candidate are drawn over all others, and the candidate's dashes over the reference.
    const paths = [...curves.slice(2), ...curves.slice(0, 2)].map((curve) => {
      let d = "", pen = "M";
      curve.losses.forEach((loss, step) => {
        if (Number.isFinite(loss)) {
          d += `${pen}${x(step).toFixed(1)} ${axis.y(loss).toFixed(1)}`;
          pen = "L";
        } else pen = "M";
      });
      const path = svg("path", { class: "curve", d, "stroke-dasharray": curve.dashes }, svg("title", {}, curve.name));
      path.style.stroke = curve.colour;
      return path;
    });
    const every = Math.max(1, Math.ceil(steps / 10));
    const ticks = [];
    for (let step = 0; step < steps; step += every) {
      ticks.push(svg("text", { x: x(step), y: bottom + 20, "text-anchor": "middle" }, String(step + 1)));
    }
    ticks.push(svg("text", { x: right, y: bottom + 38, "text-anchor": "end" }, "step"));
    return svg("svg", { viewBox: `0 0 ${width} ${bottom + 44}`, role: "img", "aria-label": label }, axis.marks, paths, ticks);
  }

  // ---------------------------------------------------------------- all checks

  const COLUMNS = [
    { key: "index", title: "#", number: true, hint: "the ladder's order" },
    { key: "passed", title: "holds", cell: (row) => glyph(row.passed) },
    { key: "rungIndex", title: "rung", cell: (row) => row.rung },
    { key: "name", title: "quantity", kind: "name" },
    { key: "relative", title: "relative", number: true, hint: "largest difference over the reference's largest magnitude" },
    { key: "max_abs", title: "max abs", number: true, hint: "largest absolute difference" },
    { key: "ulp", title: "ulp", number: true, hint: "largest difference in units in the last place of the reference" },
    { key: "rms", title: "rms", number: true, hint: "root mean square of the differences" },
    { key: "cosine", title: "1 − cos", number: true, hint: "1 minus the cosine of the angle between the two" },
    { key: "allowed", title: "allowed", number: true, hint: "the largest error that the rule allows" },
    { key: "used", title: "of allowed", number: true, hint: "the error that is judged, over what is allowed: above 1 it fails" },
    { key: "detail", title: "finding", kind: "detail" },
  ];

  const table = (() => {
    const state = { key: "index", direction: 1, text: "", rung: "", failed: false, module: null, limit: SHOWN, chosen: null };
    const body = el("tbody", { id: "rows" });
    const count = el("span", { id: "count", role: "status", class: "muted" });
    const more = el("button", { id: "more", onclick: () => { state.limit = Infinity; draw(); } });
    const search = el("input", { type: "search", id: "filter", placeholder: "name, module or finding", "aria-label": "Filter by words",
      oninput: () => { state.text = search.value; redraw(); } });
    const rung = el("select", { id: "rung", "aria-label": "Rung", onchange: () => { state.rung = rung.value; redraw(); } },
      el("option", { value: "" }, "all rungs"), rungNames.map((name) => el("option", { value: name }, name)));
    const only = el("input", { type: "checkbox", id: "failed", onchange: () => { state.failed = only.checked; redraw(); } });
    const module = el("button", { id: "module", hidden: true, onclick: () => { state.module = null; redraw(); } });
    const heads = COLUMNS.map((column) => el("th", { scope: "col", class: column.number ? "number" : "", title: column.hint },
      el("button", { "data-key": column.key, onclick: () => sortBy(column) }, column.title)));

    function sortBy(column) {
      // Errors are asked for the largest first, everything else from the beginning.
      const start = column.number && column.key !== "index" ? -1 : 1;
      state.direction = state.key === column.key ? -state.direction : start;
      state.key = column.key;
      redraw();
    }
    function compare(a, b) {
      const [x, y] = [a[state.key], b[state.key]].map((item) => (Number.isNaN(item) ? Infinity : item));
      if (x === null || y === null) return x === y ? a.index - b.index : x === null ? 1 : -1;
      const order = typeof x === "string" ? x.localeCompare(y) : x === y ? 0 : x < y ? -1 : 1;
      return order * state.direction || a.index - b.index;
    }
    function matching() {
      const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
      return rows.filter((row) => {
        if (state.failed && row.passed) return false;
        if (state.rung && row.rung !== state.rung) return false;
        if (state.module !== null && state.module !== "" && row.path !== state.module && !row.path.startsWith(state.module + ".")) return false;
        const text = `${row.name} ${row.path} ${row.detail}`.toLowerCase();
        return words.every((word) => text.includes(word));
      });
    }
    function redraw() {
      state.limit = SHOWN;
      draw();
    }
    function draw() {
      const found = matching().sort(compare);
      heads.forEach((head, place) => {
        const sorted = COLUMNS[place].key === state.key;
        head.setAttribute("aria-sort", sorted ? (state.direction > 0 ? "ascending" : "descending") : "none");
      });
      const shown = found.slice(0, state.limit);
      body.replaceChildren(...shown.map((row) => el("tr", { class: (row.passed ? "" : "failed") + (row === state.chosen ? " chosen" : ""), "data-index": row.index },
        COLUMNS.map((column) => el("td", { class: column.number ? "number" : column.kind },
          column.cell ? column.cell(row) : column.number ? show(row[column.key]) : row[column.key])))));
      count.textContent = `${found.length.toLocaleString("en")} of ${plural(rows.length, "check")}`;
      more.textContent = `Show the other ${(found.length - shown.length).toLocaleString("en")}`;
      more.hidden = shown.length === found.length;
      module.hidden = state.module === null;
      module.textContent = `module ${pathName(state.module)} ✕`;
      module.title = "Show all modules";
    }
    function show_(changes) {
      Object.assign(state, { text: "", rung: "", failed: false, module: null, chosen: null }, changes);
      search.value = state.text;
      rung.value = state.rung;
      only.checked = state.failed;
      redraw();
      document.getElementById("checks").scrollIntoView();
    }
    return {
      create() {
        section("checks", "All checks",
          el("div", { class: "controls" }, search, rung, el("label", {}, only, "failed only"), module, count),
          el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "All checks" },
            el("table", {}, el("thead", {}, el("tr", {}, heads)), body)),
          el("div", { class: "controls" }, more));
        draw();
      },
      showRung: (name) => show_({ rung: name }),
      showModule: (path, rungName) => show_({ module: path, rung: rungName }),
      reveal(row) {
        show_({ chosen: row, key: "index", direction: 1 });
        if (row.index > state.limit) {
          state.limit = Infinity;
          draw();
        }
        body.querySelector(".chosen").scrollIntoView({ block: "center" });
      },
    };
  })();

  // ---------------------------------------------------------------- the rest

  function drawZeros() {
    if (!verdict.structural_zeros.length) return;
    section("zeros", "Zero by structure",
      el("p", { class: "note" }, "The loss does not depend on these parameters, such as a bias that a softmax or a norm takes out again. Their gradients are checked to be zero on both sides; from the rungs of updates and training they are exempt, since an optimizer such as Adam turns rounding noise into full steps."),
      el("ul", { class: "plain" }, verdict.structural_zeros.map((name) => el("li", { class: "name" }, name))));
  }

  function drawConditioning() {
    const entries = Object.entries(verdict.conditioning).map(([path, factor]) => [path, value(factor)]).sort((a, b) => b[1] - a[1]);
    if (!entries.length) return;
    const top = Math.log10(Math.max(10, ...entries.map((entry) => entry[1]).filter(Number.isFinite)));
    section("conditioning", "Conditioning",
      el("p", { class: "note" }, "By how much each module amplifies rounding, measured on the reference: where this is large, a large difference is no mistake."),
      el("div", { class: "scroll" }, el("table", {},
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "module"), el("th", { scope: "col", class: "number" }, "amplification"), el("th", { scope: "col" }, "on a logarithmic scale"))),
        el("tbody", {}, entries.map(([path, factor]) => {
          const bar = el("div", { class: "bar" });
          bar.style.width = `${Number.isFinite(factor) ? (100 * Math.max(0, Math.log10(Math.max(factor, 1)))) / top : 100}%`;
          return el("tr", {}, el("td", { class: "name" }, pathName(path)), el("td", { class: "number" }, show(factor)), el("td", {}, bar));
        })))));
  }

  function drawMatches() {
    const counts = new Map();
    verdict.matches.forEach((match) => counts.set(match.how, (counts.get(match.how) || 0) + 1));
    const words = [...counts].map(([how, number]) => `${number.toLocaleString("en")} by ${how}`).join(", ");
    const host = el("div", { class: "scroll" });
    // Thousands of matches are laid out when somebody wants to see them.
    const fill = () => host.childElementCount || host.append(el("table", {},
      el("thead", {}, el("tr", {}, ["reference", "candidate", "layout", "found by"].map((title) => el("th", { scope: "col" }, title)))),
      el("tbody", {}, verdict.matches.map((match) => el("tr", {},
        el("td", { class: "name" }, match.reference || "(the model itself)"),
        el("td", { class: "name" }, match.candidates.map((group) => group.map((name) => name || "(the model itself)").join(" + ")).join(" and ")),
        el("td", {}, match.layout), el("td", {}, match.how))))));
    const details = el("details", { class: "more", id: "matches-list", ontoggle: fill }, el("summary", {}, "Show all matches"), host);
    section("matches", "Matches",
      el("p", {}, `${plural(verdict.matches.length, "name")} of parameters, buffers and modules matched: ${words || "none"}.`), details);
    if (verdict.unmatched.length) {
      section("unmatched", "Not compared",
        el("p", { class: "note" }, "These ran or were stored on one side, and nothing on the other answers to them."),
        el("ul", { class: "plain" }, verdict.unmatched.map((entry) => el("li", {}, entry))));
    }
  }

  function drawProvenance() {
    const sides = Object.keys(verdict.provenance);
    const keys = [...new Set(sides.flatMap((side) => Object.keys(verdict.provenance[side])))];
    if (!keys.length) return;
    section("provenance", "Provenance",
      el("p", { class: "note" }, "How each side was recorded. Marked, with ≠: what both state and state differently."),
      el("table", {},
        el("thead", {}, el("tr", {}, el("th", {}, ""), sides.map((side) => el("th", { scope: "col" }, side)))),
        el("tbody", {}, keys.map((key) => {
          const values = sides.map((side) => verdict.provenance[side][key]);
          const differs = values.every((item) => item !== undefined) && new Set(values).size > 1;
          return el("tr", { class: differs ? "differs" : "" }, el("th", { scope: "row" }, key, differs ? " ≠" : ""),
            values.map((item) => el("td", { class: item === undefined ? "muted" : "" }, item === undefined ? "–" : item)));
        }))));
  }

  function drawRules() {
    const terms = {
      relative: "the largest absolute difference over the reference's largest magnitude.",
      ulp: "units in the last place: the largest difference over the spacing of numbers at the reference's value, in its dtype.",
      rms: "root mean square of the differences between candidate and reference.",
      "1 − cos": "1 minus the cosine of the angle between the two as vectors; blind to a common factor.",
      allowed: "what the rule allows for the error that is judged: in float64 the largest difference, in float32 the root mean square error against the float64 truth.",
      "of allowed": "that error over what is allowed. Above 1 the check fails.",
    };
    section("rules", "How it was judged",
      el("p", {}, "The rule for values: ", el("strong", {}, verdict.rule), ". Gradients are relative to the largest of their module, updates and trained parameters to how far they moved. Parameters, buffers and masks are to be equal. NaN equals NaN only at the same place."),
      el("dl", { class: "first" }, Object.entries(terms).map(([term, meaning]) => [el("dt", {}, term), el("dd", {}, meaning)])));
  }

  drawHead();
  drawLadder();
  drawTree();
  drawErrors();
  drawTraining();
  table.create();
  drawZeros();
  drawConditioning();
  drawMatches();
  drawProvenance();
  drawRules();
})();
