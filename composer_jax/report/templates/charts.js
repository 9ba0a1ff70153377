// Shows the values under the pointer; pixels become values with the axes that the chart carries.
(() => {
  const LEFT = 56, RIGHT = 14, TOP = 12, BOTTOM = 34, WIDTH = 520, HEIGHT = 250;
  const tip = document.getElementById('tip');
  const short = v => Number(v.toPrecision(4)).toString();
  for (const svg of document.querySelectorAll('svg.chart')) {
    const [x0, x1, y0, y1, log] = svg.dataset.axes.split(' ').map(Number);
    const lines = [...svg.querySelectorAll('polyline')].map(line => ({
      name: line.dataset.name,
      points: line.getAttribute('points').split(' ').map(p => p.split(',').map(Number)),
    }));
    const cross = svg.querySelector('.cross');
    svg.addEventListener('pointermove', event => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * WIDTH;
      if (x < LEFT - 4 || x > WIDTH - RIGHT + 4) { hide(); return; }
      const rows = [];
      let at = x;
      for (const {name, points} of lines) {
        let best = points[0];
        for (const p of points) if (Math.abs(p[0] - x) < Math.abs(best[0] - x)) best = p;
        if (Math.abs(best[0] - x) > 30 && points.length > 2) continue;
        const y = y0 + (HEIGHT - BOTTOM - best[1]) / (HEIGHT - TOP - BOTTOM) * (y1 - y0);
        rows.push(`${name}  ${short(log ? 10 ** y : y)}`);
        if (points.length > 2) at = best[0];
      }
      const step = x0 + (at - LEFT) / (WIDTH - LEFT - RIGHT) * (x1 - x0);
      tip.textContent = [`step ${Math.round(step)}`, ...rows].join('\n');
      tip.style.display = 'block';
      tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
      tip.style.top = event.clientY + 14 + 'px';
      cross.setAttribute('x1', at); cross.setAttribute('x2', at);
      cross.style.visibility = 'visible';
    });
    const hide = () => { tip.style.display = 'none'; cross.style.visibility = 'hidden'; };
    svg.addEventListener('pointerleave', hide);
  }
})();
