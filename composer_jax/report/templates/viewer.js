// The rollout viewer. Traces were written by an agent: they only ever become text nodes.
(() => {
  const traces = JSON.parse(document.getElementById('traces').textContent);
  const byId = id => document.getElementById(id);
  const list = byId('list'), view = byId('trace'), legend = byId('mode-legend');
  const stage = byId('f-stage'), verdict = byId('f-reward'), stop = byId('f-stop'),
        mode = byId('f-mode');
  let shown = [], current = null;

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === 'onclick') element.onclick = value;
      else element.setAttribute(name, value);
    }
    element.append(...children.filter(c => c !== null && c !== undefined));
    return element;
  }
  const fixed = v => v === null ? '–' : Number(v.toPrecision(4)).toString();

  function options(select, values, all) {
    select.append(make('option', {value: ''}, all));
    for (const value of [...new Set(values)].sort()) select.append(make('option', {value}, value));
    select.onchange = filter;
  }
  options(stage, traces.map(t => t.stage), 'every stage');
  options(stop, traces.map(t => t.stop), 'every stop reason');
  verdict.onchange = filter;
  mode.onchange = () => current && show(current);

  function filter() {
    shown = traces.filter(t => (!stage.value || t.stage === stage.value)
      && (!stop.value || t.stop === stop.value)
      && (!verdict.value || t.verdict === verdict.value));
    shown.sort((a, b) => a.stage === b.stage ? (a.step ?? 0) - (b.step ?? 0) : 0);
    list.replaceChildren(...shown.map(t => make('button', {onclick: () => show(t)},
      make('span', {class: {solved: 'good', failed: 'bad', none: 'warn'}[t.verdict]},
        {solved: '● ', failed: '○ ', none: '– '}[t.verdict]),
      `${t.task || t.id}`,
      make('small', {}, `${t.stage} · step ${t.step ?? '–'} · ${t.turns.length} turns · ${t.stop}`))));
    byId('count').textContent = `${shown.length} of ${traces.length}`;
    if (shown.length) show(shown[0]); else view.replaceChildren('nothing matches');
  }

  // Each way to colour a token: [-> legend entries, token -> background].
  const blue = a => `rgba(70,120,230,${a})`, red = a => `rgba(220,60,45,${a})`;
  const grey = 'rgba(128,128,128,.16)';
  const gap = ([, , lp, tlp]) => lp === null || tlp === null ? null : Math.abs(lp - tlp);
  const owned = () => current.stage.startsWith('eval_') ? 'sampled' : 'trained on';
  // SFT gives prompts and results a small weight, and shows some mistakes without teaching them.
  const masks = () => ({1: owned(), 0: current.stage === 'sft' ? 'context_weight' : 'context',
    ...(current.stage === 'sft' ? {'-1': 'not learnt'} : {})});
  const maskColours = {1: blue(.3), 0: grey, '-1': red(.3)};
  const hue = v => `hsla(${(v * 67) % 360},65%,52%,.35)`;
  const modes = {
    mask: [() => Object.entries(masks()).map(([m, name]) => [name, maskColours[m]]),
      t => maskColours[t[1]]],
    gap: [() => [['0', blue(.08)], ['1e-6', red(.1)], ['1e-3', red(.5)], ['1 or more', red(.95)],
                 ['not sampled', grey]],
      t => { const g = gap(t);
        return g === null ? grey : g === 0 ? blue(.08)
          : red(Math.min(.95, Math.max(.06, .1 + (Math.log10(g) + 6) / 6 * .85))); }],
    prob: [() => [['sure', blue(.05)], ['unlikely', blue(.9)], ['not sampled', grey]],
      t => t[2] === null ? grey : blue(Math.min(.9, .05 + -t[2] / 4))],
    version: [() => [['colour by policy version', hue(1)], ['not sampled', grey]],
      t => t[4] === null || t[4] < 0 ? grey : hue(t[4])],
  };

  function token(t) {
    const [text, mask, lp, tlp, version] = t;
    const g = gap(t);
    return make('span', {class: 'tok', style: `background:${modes[mode.value][1](t)}`,
      title: [masks()[mask], `sampler log-prob ${fixed(lp)}`,
        `trainer log-prob ${fixed(tlp)}`, `gap ${g === null ? '–' : g.toExponential(1)}`,
        `policy version ${version === null || version < 0 ? '–' : version}`].join('\n')}, text);
  }

  function turn(t, number) {
    const versions = [...new Set(t.tokens.map(x => x[4]).filter(v => v !== null && v >= 0))];
    const gaps = t.tokens.map(gap).filter(g => g !== null);
    return make('div', {class: 'turn' + (t.error ? ' failed' : '')},
      make('div', {class: 'note'}, `turn ${number + 1} · ${t.tokens.length} tokens`
        + (versions.length ? ` · policy version ${versions.join(', ')}` : '')
        + (gaps.length ? ` · largest gap ${Math.max(...gaps).toExponential(1)}` : '')
        + (t.error ? ` · error: ${t.error}` : '')),
      make('pre', {}, t.call),
      t.result ? make('pre', {class: 'result'}, '→ ' + t.result) : null,
      t.tokens.length ? make('div', {class: 'tokens mono'}, ...t.tokens.map(token)) : null);
  }

  function show(trace) {
    current = trace;
    [...list.children].forEach((b, i) => b.setAttribute('aria-current', shown[i] === trace));
    legend.replaceChildren(...modes[mode.value][0]().flatMap(([name, colour]) =>
      [make('i', {class: 'swatch', style: `background:${colour}`}), name]));
    const chip = text => make('span', {}, text);
    view.replaceChildren(
      make('h4', {}, trace.task || trace.id),
      make('div', {class: 'chips'},
        chip(`reward ${fixed(trace.reward)}`), chip(trace.stop), chip(trace.stage),
        chip(`step ${trace.step ?? '–'}`), trace.group ? chip(`group ${trace.group}`) : null,
        trace.advantage === null ? null : chip(`advantage ${fixed(trace.advantage)}`),
        trace.label ? chip(trace.label) : null,
        ...Object.entries(trace.parts).map(([k, v]) => chip(`${k} ${fixed(v)}`))),
      make('pre', {}, trace.instruction),
      ...Object.entries(trace.files).map(([path, text]) =>
        make('details', {}, make('summary', {}, path), make('pre', {}, text))),
      ...trace.turns.map(turn));
  }

  document.addEventListener('keydown', event => {
    const move = {ArrowDown: 1, ArrowUp: -1, j: 1, k: -1}[event.key];
    if (!move || !current || !list.contains(document.activeElement)) return;
    const next = shown[shown.indexOf(current) + move];
    if (next) { show(next); list.children[shown.indexOf(next)].focus(); event.preventDefault(); }
  });
  filter();
})();
