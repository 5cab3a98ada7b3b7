// Sets what is between dollar signs, which arrives as \(…\) and \[…\] in elements of the class arithmatex. KaTeX lies
// beside this file; pages without mathematics do not load it.
(() => {
  const found = document.querySelectorAll(".arithmatex");
  if (!found.length) return;
  const folder = document.currentScript.src.replace(/[^/]*$/, "katex/");
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = folder + "katex.min.css";
  const script = document.createElement("script");
  script.src = folder + "katex.min.js";
  script.onload = () => {
    for (const one of found) {
      const text = one.textContent;
      katex.render(text.slice(2, -2), one, { displayMode: text.startsWith("\\["), throwOnError: true });
    }
    document.documentElement.dataset.math = "set";
  };
  document.head.append(style, script);
})();
