"use strict";
// Values under the pointer, at the same step in all panels. Text is set with textContent only.
(() => {
  document.documentElement.classList.add("scripted");
  const { frame, panels } = JSON.parse(document.getElementById("data").textContent);
  const figures = [...document.querySelectorAll("figure.panel")];

  const number = (value, percent) => {
    if (percent) return (100 * value).toFixed(1) + "%";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    return size >= 1000 ? Math.round(value).toLocaleString("en-US") : value.toFixed(size >= 100 ? 1 : 4);
  };

  const nearest = (xs, x) => {
    let low = 0;
    let high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle;
      else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };

  const show = (step, under) => {
    figures.forEach((figure) => {
      const panel = panels[Number(figure.dataset.panel)];
      const [first, last] = panel.bounds;
      const cursor = figure.querySelector(".cursor");
      const readout = figure.querySelector(".readout");
      const x = frame.left + ((step - first) / (last - first)) * (frame.width - frame.left - frame.right);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.removeAttribute("hidden");
      readout.hidden = figure !== under;
      if (figure !== under) return;
      readout.replaceChildren();
      panel.values.forEach((series) => {
        const i = nearest(series.x, step);
        const line = document.createElement("div");
        const name = document.createElement("span");
        const value = document.createElement("span");
        name.textContent = series.label + " ";
        const at = document.createElement("span");
        at.className = "step";
        at.textContent = "at " + series.x[i].toLocaleString("en-US");
        name.append(at);
        value.textContent = number(series.y[i], panel.percent);
        line.append(name, value);
        readout.append(line);
      });
      const share = x / frame.width;
      readout.style.left = share < 0.5 ? 100 * share + 3 + "%" : "auto";
      readout.style.right = share < 0.5 ? "auto" : 100 * (1 - share) + 3 + "%";
    });
  };

  const hide = () =>
    figures.forEach((figure) => {
      figure.querySelector(".cursor").setAttribute("hidden", "");
      figure.querySelector(".readout").hidden = true;
    });

  figures.forEach((figure) => {
    const svg = figure.querySelector("svg");
    const [first, last] = panels[Number(figure.dataset.panel)].bounds;
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const pixel = ((event.clientX - box.left) / box.width) * frame.width;
      const share = (pixel - frame.left) / (frame.width - frame.left - frame.right);
      if (share < -0.02 || share > 1.02) hide();
      else show(first + Math.min(1, Math.max(0, share)) * (last - first), figure);
    });
    svg.addEventListener("pointerleave", hide);
  });
})();
