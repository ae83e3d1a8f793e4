// Figures to move: fills every <div class="explore" data-explore="walk"> (or another name of EXPLORABLES) of a page.
// Needs d3 and Plot; window needs t5.js, trained needs trained.js. A page may load this file more than once.
// README.txt has the rest.
(() => {
  if (!globalThis.Plot?.plot || globalThis.Plot.explored) return; // the first load fills what stands below it, too
  globalThis.Plot.explored = true;
  const Plot = { ...globalThis.Plot }; // a second load would count ids from 1 again
  const ONE = "var(--explore-1)", TWO = "var(--explore-2)", TEXT = "currentColor"; // they follow the theme
  const SOLID = { stroke: ONE, strokeWidth: 2.5 }, DASHED = { stroke: TWO, strokeWidth: 2, strokeDasharray: "6 4" };
  const one = d3.format(".1f"), two = d3.format(".2f"), three = d3.format(".3f");
  const short = d3.format(".3~g"), whole = d3.format(",");
  const log = (domain, ticks, tickFormat = whole) => ({ type: "log", domain, ticks, tickFormat, grid: true });

  /** Least squares: the straight line through points. */
  const line = (xs, ys) => {
    const x = d3.mean(xs), y = d3.mean(ys);
    const slope = d3.sum(xs, (each, i) => (each - x) * (ys[i] - y)) / d3.sum(xs, (each) => (each - x) ** 2);
    return { slope, start: y - slope * x };
  };
  const power = (xs, ys) => line(xs.map(Math.log), ys.map(Math.log)); // the slope is the exponent

  // 1. Random walks --------------------------------------------------------------------------------------------------
  const DIMENSIONS = [1, 2, 3, 10, 100, 1000], WALKS = 20, P = 0.04; // P: probability of a burst
  const TIMES = [...new Set(d3.range(17).map((i) => Math.round(10 ** (i / 4))))], LATE = 100; // slopes from LATE on
  const TENS = d3.range(-3, 10).map((i) => 10 ** i), ROOT = "√t\u00a0E‖δ‖"; // no break in it
  const ten = (v) => (v < 1 ? short(v) : v < 1e5 ? whole(v) : "10" + "⁰¹²³⁴⁵⁶⁷⁸⁹"[Math.round(Math.log10(v))]);

  /** Mulberry32: 32 random bits a call, the same ones for a seed in every browser. */
  const randomBits = (seed) => () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let z = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    z ^= z + Math.imul(z ^ (z >>> 7), 61 | z);
    return (z ^ (z >>> 14)) >>> 0;
  };
  const ones = (word) => { // bits that are set
    word -= (word >>> 1) & 0x55555555;
    word = (word & 0x33333333) + ((word >>> 2) & 0x33333333);
    return Math.imul((word + (word >>> 4)) & 0x0f0f0f0f, 0x01010101) >>> 24;
  };
  /** What draws numbers: all from the same bits. */
  const draws = (seed) => {
    const bits = randomBits(seed), uniform = () => bits() / 2 ** 32;
    const [normal, cauchy] = [d3.randomNormal, d3.randomCauchy].map((random) => random.source(uniform)());
    return { bits, normal, cauchy, binomial: d3.randomBinomial.source(uniform) };
  };
  /** Mean length of a standard Gaussian vector, √2 Γ((n+1)/2) / Γ(n/2). */
  const gaussian = (n) => {
    let ratio = 1 / Math.sqrt(Math.PI);
    for (let k = 1; k < n; k++) ratio = k / 2 / ratio; // from Γ(x+1) = x Γ(x)
    return Math.SQRT2 * ratio;
  };
  // Walks are sampled at TIMES only, exactly. `sum`: what draws one coordinate of the sum of m steps.
  // `length`: mean length of a step in n dimensions. `limit`: mean norm over √t of it, t → ∞.
  // `view`: lowest and highest norm shown, in `unit`s.
  const LAWS = {
    Gaussian: { sum: ({ normal }, m) => () => Math.sqrt(m) * normal(), length: gaussian, limit: () => 1, unit: gaussian, view: [0.2, 400] },
    "±1": {
      sum: ({ bits }, m) => () => { // twice the heads among m coins, 32 at once, less m
        let heads = 0, left = m;
        for (; left >= 32; left -= 32) heads += ones(bits());
        return 2 * (heads + ones(bits() & (2 ** left - 1))) - m;
      },
      length: Math.sqrt, limit: (n) => gaussian(n) / Math.sqrt(n), unit: Math.sqrt, view: [0.2, 400],
    },
    "bursts, p = 0.04": { // with probability P a Gaussian step, else none
      sum: ({ normal, binomial }, m) => {
        const terms = binomial(m, P)(); // of the whole step: the same for all coordinates
        return () => Math.sqrt(terms) * normal();
      },
      length: (n) => P * gaussian(n), limit: () => 1 / Math.sqrt(P), unit: gaussian, view: [0.03, 80],
    },
    Cauchy: { sum: ({ cauchy }, m) => () => m * cauchy(), unit: (n) => n, view: [0.1, 1e6] }, // no mean length
  };
  const walks = (law, n, seed) => {
    const drawn = draws(seed);
    return d3.range(WALKS).map(() => {
      const theta = new Float64Array(n);
      return TIMES.map((t, i) => {
        const step = law.sum(drawn, t - (TIMES[i - 1] ?? 0));
        for (let j = 0; j < n; j++) theta[j] += step();
        return Math.sqrt(theta.reduce((square, x) => square + x * x, 0)) || NaN; // 0 has no place on a log axis
      });
    });
  };
  const walk = {
    title: "Random walks: norm against steps",
    controls: [
      { name: "index", label: "dimension n", max: 5, value: 3, show: (i) => whole(DIMENSIONS[i]) },
      { name: "lawName", label: "law of the steps", options: Object.keys(LAWS) },
      { name: "seed", label: "Draw again", button: true },
    ],
    draw({ index, lawName, seed }) {
      const n = DIMENSIONS[index], law = LAWS[lawName], norms = walks(law, n, seed);
      const middle = law.length ? "mean" : "median", alpha = law.length ? 2 : 1; // t steps grow like t^(1/alpha)
      const typical = TIMES.map((_, i) => d3[middle](norms, (norm) => norm[i] || 0) || NaN);
      const theory = (t) => (law.length ? law.length(n) : typical[0]) * t ** (1 / alpha);
      const late = TIMES.findIndex((t) => t >= LATE), { slope } = power(TIMES.slice(late), typical.slice(late));
      const constant = typical.at(-1) / theory(TIMES.at(-1)), view = law.view.map((v) => v * law.unit(n));
      return {
        x: { ...log(d3.extent(TIMES), TENS.slice(3, 8)), label: "steps t" },
        y: { ...log(view, TENS.filter((v) => v >= view[0] && v <= view[1]), ten), label: "norm ‖θ‖" },
        marks: [
          norms.map((norm) => Plot.lineY(norm, { x: TIMES, stroke: TEXT, strokeOpacity: 0.3, strokeWidth: 1 })),
          Plot.lineY(typical, { x: TIMES, ...SOLID }),
          Plot.dot(typical, { x: TIMES, y: typical, fill: ONE, r: 3.5 }),
          Plot.lineY(TIMES, { x: TIMES, y: theory, ...DASHED }),
        ],
        keys: { faint: `${WALKS} walks`, dots: `their ${middle}`, dashed: law.length ? ROOT : "t × first median" },
        reads: `Draw ${seed}: slope ${two(slope)} from t = ${LATE} on, theory ${two(1 / alpha)}. ` + (law.length
          ? `At the end the mean is ${two(constant)} times ${ROOT}, theory ${two(law.limit(n))}.`
          : "A Cauchy step has no mean length; this is the median."),
        says: `Norm against steps, log-log, of ${WALKS} walks, dimension ${whole(n)}, ${lawName} steps. ` +
          `Their ${middle} rises with slope ${two(slope)}.`,
      };
    },
  };

  // 2. Along a ray of parameters -------------------------------------------------------------------------------------
  const FARTHEST = 6, scales = d3.range(0, FARTHEST + 0.001, 0.02); // of those shown
  const ray = {
    title: "Along a ray: loss against the scale c",
    controls: [
      { name: "a", label: "accuracy a", min: 0.5, max: 1, step: 0.01, value: 0.8, show: two },
      { name: "k", label: "degree k", min: 1, max: 3, value: 1 },
    ],
    draw({ a, k }) {
      const softplus = (x) => Math.max(x, 0) + Math.log1p(Math.exp(-Math.abs(x)));
      const sigmoid = (x) => 1 / (1 + Math.exp(-x));
      const loss = (c) => a * softplus(-(c ** k)) + (1 - a) * softplus(c ** k);
      const projection = (c) => k * c ** k * ((1 - a) * sigmoid(c ** k) - a * sigmoid(-(c ** k))); // θ·∇L, by Euler
      // The loss is lowest where the projection changes sign: halve the interval. Below 0 all along: no lowest loss.
      let low = 0, high = FARTHEST;
      for (let i = 0, c = high / 2; i < 60; i++, c = (low + high) / 2) projection(c) < 0 ? (low = c) : (high = c);
      const minimum = high === FARTHEST ? [] : low === 0 ? [0] : [high], told = minimum.length ? three(minimum[0]) : "∞";
      return {
        x: { label: "scale c", domain: [0, FARTHEST], grid: true },
        y: { label: "loss, θ·∇L", domain: [-1, 1.5], grid: true, tickFormat: one, ticks: 6 },
        marks: [
          Plot.ruleY([0], { strokeOpacity: 0.6 }),
          Plot.ruleX(minimum, { stroke: TEXT, strokeDasharray: "2 3" }),
          Plot.lineY(scales, { x: scales, y: projection, ...DASHED }),
          Plot.lineY(scales, { x: scales, y: loss, ...SOLID }),
          Plot.dot(minimum, { x: minimum, y: loss, fill: ONE, r: 5, clip: false }),
        ],
        keys: { line: "loss L(c)", dashed: "θ·∇L", ...(minimum.length && { dot: "lowest loss" }) },
        reads: `Equilibrium c* = ${told}` + (minimum.length
          ? `, with loss ${three(loss(minimum[0]))}.` : ": nothing is wrong, and the loss falls for ever."),
        says: `Loss and projection along a ray, accuracy ${two(a)}, degree ${k}. ` + (minimum.length
          ? `The loss is lowest at scale ${told}, where the projection changes sign.` : "The loss falls all along."),
      };
    },
  };

  // 3. Saturated attention -------------------------------------------------------------------------------------------
  const attention = {
    title: "Attention at position 4: softmax against its saturated limit",
    controls: [
      { name: "second", label: "score of key 2", min: -1, max: 2, step: 0.05, value: -0.3, show: two },
      { name: "exponent", label: "scale c", min: 0, max: 2, step: 0.05, value: 0.5, show: (x) => short(10 ** x) },
      { name: "mask", label: "mask", options: ["future × 0", "future at −∞", "none"] },
    ],
    draw({ second, exponent, mask }) {
      const scores = [-0.5, second, -0.1, -0.2, 2, -0.4], c = 10 ** exponent, here = 4; // later keys are the future
      const seen = mask === "none" ? scores : [...scores.slice(0, here), ...(mask === "future × 0" ? [0, 0] : [])];
      const n = seen.length, best = d3.max(seen);
      const next = best - d3.max(seen.filter((s) => s < best)), winners = seen.filter((s) => s === best).length;
      const powers = seen.map((s) => Math.exp(c * (s - best))), sum = d3.sum(powers);
      const rows = seen.map((s, i) => ({ key: i + 1, soft: powers[i] / sum, hard: s === best ? 1 / winners : 0 }));
      const error = d3.max(rows, (row) => Math.abs(row.soft - row.hard)), bound = (n - 1) * Math.exp(-c * next);
      const named = (key) => `${key}\n${key > n ? "−∞" : d3.format(".2~f")(seen[key - 1])}`;
      const [soft, hard] = ["soft", "hard"].map((kind) => d3.sum(rows.slice(here), (row) => row[kind]));
      const weights = rows.map(({ key, soft, hard }) => `key ${key} ${two(soft)} (saturated ${two(hard)})`);
      return {
        x: { label: "key and its score", domain: d3.range(1, 7), tickFormat: named, tickSize: 0, padding: 0.25 },
        y: { label: "weight", domain: [0, 1], grid: true, ticks: 5 },
        marginBottom: 54, clip: false,
        marks: [
          Plot.barY(rows, { x: "key", y: "soft", fill: ONE, insetLeft: 4, insetRight: 4 }),
          Plot.barY(rows.filter((row) => row.hard), { x: "key", y: "hard", fill: "none", ...DASHED }),
          Plot.ruleY([0]),
        ],
        keys: { bar: "softmax(c s)", frame: "saturated, c → ∞" },
        reads: `Largest error ${short(error)}, bound (n − 1) exp(−c\u00a0g) = ${short(bound)} with n = ${n} keys ` +
          `and gap g = ${two(next)} to the next score.` +
          (mask === "none" ? "" : ` Weight on the future ${three(soft)}, saturated ${three(hard)}.`),
        says: `Attention weights at scale ${short(c)}: ${weights.join(", ")}.`,
      };
    },
  };

  // 4. The window of a fit -------------------------------------------------------------------------------------------
  const t5 = () => globalThis.exploreT5, FEWEST = 5; // checkpoints in a window
  const STEPS = { min: 1, max: 103, show: (i) => whole(t5().step[i]) }; // step 0 has no place on a log axis
  const fitWindow = {
    title: "T5's norm: laws fitted in a window",
    ready: () => Boolean(t5()),
    controls: [
      { name: "first", label: "first step", value: 2, ...STEPS },
      { name: "last", label: "last step", value: 103, ...STEPS },
    ],
    hold: ({ first, last }, moved) => moved === "last" // it stops before the other end
      ? { last: Math.max(last, first + FEWEST - 1) } : { first: Math.min(first, last - FEWEST + 1) },
    draw({ first, last }) {
      const step = t5().step.slice(1), norm = t5().norm.slice(1), inside = (values) => values.slice(first - 1, last);
      const free = power(inside(step), inside(norm)), root = line(inside(step).map(Math.sqrt), inside(norm));
      const ends = d3.extent(inside(step)), told = ends.map(whole).join(" to "), exponent = two(free.slope);
      const law = (f, style) => [step, inside(step)].map((ts, i) => // faint where it was not fitted
        Plot.lineY(ts, { x: ts, y: (t) => (f(t) > 0 ? f(t) : NaN), strokeOpacity: i ? 1 : 0.45, ...style }));
      return {
        x: { ...log([4600, 580000], [5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5], d3.format("~s")), label: "training step t" },
        y: { ...log([450, 6000], [500, 1000, 2000, 5000]), label: "norm ρ" },
        marks: [
          Plot.rect([ends], { x1: "0", x2: "1", fill: TEXT, fillOpacity: 0.08 }),
          Plot.dot(step, { x: step, y: norm, r: 2, stroke: TEXT, strokeOpacity: 0.6 }),
          law((t) => root.start + root.slope * Math.sqrt(t), DASHED),
          law((t) => Math.exp(free.start) * t ** free.slope, SOLID),
        ],
        keys: { circle: "T5-base", dashed: "a√t + b", line: "power of t, no b", band: "window" },
        reads: `Exponent ${exponent}, a straight line in logarithms, from step ${told}. ` +
          `Root law ${three(root.slope)} √t ${root.start < 0 ? "−" : "+"} ${one(Math.abs(root.start))}.`,
        says: `Norm of T5-base, log-log, with the laws fitted to steps ${told}: a power ${exponent}, and a root law.`,
      };
    },
  };

  // 5. Softmax and the gap -------------------------------------------------------------------------------------------
  const LAST = 4, factors = d3.range(1, 8.001, 0.05); // the third score is LAST below the first
  const gap = {
    title: "Softmax of three scores: distance from its limit",
    controls: [
      { name: "g", label: "gap g", min: 0, max: 3, step: 0.05, value: 0.5, show: two },
      { name: "m", label: "added to all", min: 0, max: 10, step: 0.5, value: 2, show: one },
    ],
    draw({ g, m }) {
      const behind = [0, g, LAST], norm = Math.hypot(...behind.map((b) => m - b)), winners = g ? 1 : 2, next = g || LAST;
      const error = (c) => { // of the largest weight and of the next
        const powers = behind.map((b) => Math.exp(-c * b)), sum = d3.sum(powers);
        return d3.max(behind, (b, i) => Math.abs(powers[i] / sum - (b === 0 ? 1 / winners : 0)));
      };
      const bound = (c) => 2 * Math.exp(-c * next), ofNorm = (c) => Math.exp(-c * norm), end = factors.at(-1);
      return {
        x: { label: "scale c", domain: [1, end], grid: true, ticks: 7 },
        y: { ...log([1e-9, 3], [1e-9, 1e-6, 1e-3, 1], d3.format(".0e")), label: "error" },
        marks: [
          Plot.lineY(factors, { x: factors, y: ofNorm, stroke: TEXT, strokeOpacity: 0.5 }),
          Plot.lineY(factors, { x: factors, y: bound, ...DASHED }),
          Plot.lineY(factors, { x: factors, y: error, ...SOLID }),
        ],
        keys: { line: "error", dashed: "(n − 1) exp(−c g)", faint: "exp(−c ‖x‖)" },
        reads: `Norm ‖x‖ = ${two(norm)}, gap ${two(next)} to the next score. At c = ${end} the error is ` +
          `${short(error(end))}, the bound by the gap ${short(bound(end))}, exp(−c\u00a0‖x‖) ${short(ofNorm(end))}.`,
        says: `Distance of softmax from its limit against scale, gap ${two(g)}, norm ${two(norm)}. ` +
          `It falls like the exponential of minus ${two(next)} c, whatever the norm.`,
      };
    },
  };

  // 6. Two stacks and one fit ----------------------------------------------------------------------------------------
  const TRAINED = d3.range(5000, 500_001, 5000), FINAL = TRAINED.at(-1);
  const stacks = {
    title: "Two stacks: their norm, and a√t + b fitted to it",
    controls: [
      { name: "p", label: "exponent of the second stack", min: 0.2, max: 1.2, step: 0.01, value: 0.8, show: two },
      { name: "share", label: "its share of ρ² at the end", min: 0, max: 1, step: 0.01, value: 0.5, show: two },
    ],
    draw({ p, share }) {
      const first = (t) => Math.sqrt((1 - share) * (t / FINAL)) || NaN, second = (t) => Math.sqrt(share) * (t / FINAL) ** p || NaN;
      const whole = TRAINED.map((t) => Math.sqrt((1 - share) * (t / FINAL) + share * (t / FINAL) ** (2 * p)));
      const { slope, start } = line(TRAINED.map(Math.sqrt), whole), law = (t) => start + slope * Math.sqrt(t);
      const mean = d3.mean(whole);
      const r2 = 1 - d3.sum(whole, (rho, i) => (rho - law(TRAINED[i])) ** 2) / d3.sum(whole, (rho) => (rho - mean) ** 2);
      const exponent = (1 - share) / 2 + share * p, ofLaw = (slope * Math.sqrt(FINAL)) / law(FINAL) / 2;
      return {
        x: { ...log([4600, 580000], [5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5], d3.format("~s")), label: "training step t" },
        y: { ...log([0.01, 1.5], [0.01, 0.1, 1], short), label: "norm ρ over its end" },
        marks: [
          [first, second].map((f) => Plot.lineY(TRAINED, { x: TRAINED, y: f, stroke: TEXT, strokeOpacity: 0.5 })),
          Plot.dot(whole, { x: TRAINED, y: whole, r: 2, fill: ONE }),
          Plot.lineY(TRAINED, { x: TRAINED, y: (t) => (law(t) > 0 ? law(t) : NaN), ...DASHED }),
        ],
        keys: { faint: "the stacks: √t, and a power", dot: "both", dashed: "a√t + b" },
        reads: `R² = ${d3.format(".4f")(r2)}. Exponent at the end ${three(exponent)}, that of its a√t + b ${three(ofLaw)}.`,
        says: `Norm of two stacks, log-log, one like root t, one with exponent ${two(p)} and ${two(share)} of the square ` +
          `at the end. The exponent of both is ${three(exponent)} there.`,
      };
    },
  };

  // 7. Along the ray of a trained model ------------------------------------------------------------------------------
  const measured = () => globalThis.exploreTrained; // of the run: {scales, constant, parts: {name: {agreement, accuracy}}}
  const scaled = (c) => (c < 100 ? short(c) : whole(c));
  const trained = {
    title: "A trained language model with its parameters, or a part of them, times c",
    ready: () => Boolean(measured()),
    controls: () => [
      { name: "part", label: "times c", options: Object.keys(measured().parts) },
      { name: "i", label: "scale c", max: measured().scales.length - 1, value: measured().scales.indexOf(1), show: (i) => scaled(measured().scales[i]) },
    ],
    draw({ part, i }) {
      const { scales, constant, parts } = measured(), { agreement, accuracy } = parts[part], c = scales[i];
      const known = (values) => values[i] !== null;
      const read = known(agreement) ? `agreement ${two(agreement[i])}, accuracy ${two(accuracy[i])}` : "not measured";
      return {
        x: { ...log(d3.extent(scales), [1, 2, 10, 100, 1000], scaled), label: "scale c" },
        y: { label: "share of predictions", domain: [0, 1], grid: true, ticks: 5 },
        marks: [
          Plot.ruleY([constant], { stroke: TEXT, strokeDasharray: "2 3" }),
          Plot.ruleX([c], { stroke: TEXT, strokeOpacity: 0.5 }),
          Plot.line(d3.zip(scales, agreement).filter(([, share]) => share !== null), { ...DASHED }),
          Plot.line(d3.zip(scales, accuracy).filter(([, share]) => share !== null), { ...SOLID }),
          Plot.dot(known(accuracy) ? [[c, accuracy[i]]] : [], { fill: ONE, r: 5 }),
        ],
        keys: { line: "right", dashed: "as at c = 1", dotted: "right, the most frequent token alone" },
        reads: `${part}, c = ${scaled(c)}: ${read}. The most frequent token alone has an accuracy of ${two(constant)}.`,
        says: `Shares of predictions against scale, ${part} scaled. At scale ${scaled(c)}: ${read}.`,
      };
    },
  };

  // The frame that all share -----------------------------------------------------------------------------------------
  const make = (tag, properties = {}, ...children) => {
    const element = document.createElement(tag);
    const set = (key, value) => (/-|role/.test(key) ? element.setAttribute(key, value) : (element[key] = value));
    Object.entries(properties).forEach((pair) => set(...pair));
    element.append(...children);
    return element;
  };
  const KEYS = { // how a line of the legend is drawn, 26 by 12
    line: `<path d="M0 6H26" stroke="${ONE}" stroke-width="2.5"/>`,
    dashed: `<path d="M0 6H26" stroke="${TWO}" stroke-width="2.5" stroke-dasharray="6 4"/>`,
    dotted: `<path d="M0 6H26" stroke="${TEXT}" stroke-dasharray="2 3"/>`,
    faint: `<path d="M0 6H26" stroke="${TEXT}" stroke-opacity=".5"/>`,
    dots: `<path d="M0 6H26" stroke="${ONE}" stroke-width="2"/><circle cx="13" cy="6" r="4" fill="${ONE}"/>`,
    dot: `<circle cx="13" cy="6" r="5" fill="${ONE}"/>`,
    circle: `<circle cx="13" cy="6" r="3" fill="none" stroke="${TEXT}"/>`,
    bar: `<rect x="3" width="20" height="12" fill="${ONE}"/>`,
    frame: `<rect x="3" y="1" width="20" height="10" fill="none" stroke="${TWO}" stroke-width="2" stroke-dasharray="6 3"/>`,
    band: `<rect x="3" width="20" height="12" fill="${TEXT}" fill-opacity=".15"/>`,
  };
  const legend = ([key, text]) => `<span><svg viewBox="0 0 26 12" aria-hidden="true">${KEYS[key]}</svg>${text}</span>`;

  const build = (div, { title, controls, draw, hold = () => ({}) }, id) => {
    const [panel, box, legends] = ["controls", "chart", "keys"].map((name) => make("div", { className: `explore-${name}` }));
    const output = make("output", { "aria-live": "polite" }), values = {};
    let width = 0;
    const show = () => {
      const { keys, reads, says, x, ...options } = draw(values);
      const svg = Plot.plot({
        width, height: Math.min(380, Math.max(260, 0.62 * width)), marginLeft: 58, marginTop: 24, marginBottom: 42,
        style: { fontSize: "12px", background: "none" }, clip: true,
        x: { labelAnchor: "center", labelArrow: "none", ...x }, ...options,
      });
      svg.querySelectorAll("[aria-label]").forEach((part) => part.removeAttribute("aria-label")); // one picture, one name
      svg.setAttribute("role", "img");
      svg.setAttribute("aria-label", says);
      box.replaceChildren(svg);
      legends.innerHTML = Object.entries(keys).map(legend).join("");
      if (output.textContent !== reads) output.textContent = reads; // read aloud only when it says something new
    };
    const control = ({ name, label, options, button, show: named = String, min = 0, max, step = 1, value }) => {
      if (button) {
        values[name] = 1; // presses, from 1
        return make("button", { type: "button", textContent: label, onclick: () => (values[name]++, show()) });
      }
      const input = options ? make("select", {}, ...options.map((option) => new Option(option, option)))
        : make("input", { type: "range", min, max, step, value });
      const shown = make("span", { "aria-hidden": true }); // screen readers have it from the slider
      const take = () => {
        values[name] = options ? input.value : +input.value;
        if (options) return;
        if (width) Object.assign(values, hold(values, name)); // not before all controls are there
        input.value = values[name];
        shown.textContent = named(values[name]);
        input.setAttribute("aria-valuetext", shown.textContent);
      };
      input.id = `${id}-${name}`;
      input.addEventListener("input", () => (take(), show()));
      take();
      return make("div", {}, make("label", { htmlFor: input.id, textContent: label }), input, shown);
    };
    panel.append(...(typeof controls === "function" ? controls() : controls).map(control));
    const parts = [make("figcaption", { textContent: title }), panel, box, legends, output];
    div.replaceChildren(make("figure", { role: "group", "aria-label": title }, ...parts));
    const fit = () => { // text keeps its size, so a new width is a new drawing
      const now = Math.max(240, Math.floor(box.clientWidth));
      if (now !== width) (width = now), show();
    };
    fit();
    new ResizeObserver(fit).observe(box);
  };

  const EXPLORABLES = { walk, ray, attention, window: fitWindow, gap, stacks, trained };
  const fill = () => document.querySelectorAll("div.explore[data-explore]").forEach((div, i) => {
    const explorable = EXPLORABLES[div.dataset.explore];
    if (!explorable) console.error(`explore.js: nothing is called ${div.dataset.explore}`);
    else if (!div.querySelector("figure") && (explorable.ready?.() ?? true)) build(div, explorable, `explore-${i}`);
  });
  fill();
  document.addEventListener("DOMContentLoaded", fill); // for what stands below the script
})();
