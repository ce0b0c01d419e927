// JupyterLab shows how much time the job has left, warns before it ends, and saves what was changed.
// The hub knows the end, see job_pages.py. This file is loaded as it is: there is nothing to build.
(() => {
  const NAME = "ddl-labs-time-left";
  // Seconds: between two questions to the hub and two looks at the clock; before the end, when the
  // warning comes, and from when on changes are saved again and again.
  const ASK = 120, LOOK = 5, WARN = 600, LAST = 60;

  const inWords = seconds => {
    if (seconds <= 0) return "The job's time is over";
    if (seconds < 120) return `Job: ${Math.ceil(seconds)} s left`;
    const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
    return hours ? `Job: ${hours} h ${minutes % 60} min left` : `Job: ${minutes} min left`;
  };

  // Documents that JupyterLab is saving, for us, for the student or by itself. A second save would
  // find a file that the first one has changed, and would ask the student what to do about it.
  const saving = new WeakSet(), followed = new WeakSet();
  const follow = context => {
    if (followed.has(context)) return;
    followed.add(context);
    context.saveState.connect((_, state) => {
      if (state === "started") saving.add(context);
      else saving.delete(context);
    });
  };

  // Save the documents in the main area that were changed and can be written.
  const save = app => {
    for (const { context } of app.shell.widgets("main")) {
      if (!context?.model) continue;
      follow(context);
      const { dirty, readOnly } = context.model;
      if (dirty && !readOnly && !saving.has(context)) context.save().catch(() => {});
    }
  };

  const activate = (app, bar, { Notification }, { PageConfig }, { Widget }) => {
    const hub = PageConfig.getOption("hubPrefix");
    if (!hub) return;
    const address = PageConfig.getOption("hubHost") + hub.replace(/\/?$/, "/") + "job-time";
    const item = new Widget(), text = document.createElement("span");
    text.className = "jp-StatusBar-TextItem";
    text.setAttribute("role", "timer");
    text.title = "Slurm ends the job then, and the kernels with it";
    item.node.append(text);
    let end = null, warned = false, asked = -Infinity;

    const ask = async () => {
      try {
        const { left } = await (await fetch(address)).json();
        // A hub that has just started does not know yet.
        if (Number.isFinite(left)) end = Date.now() + 1000 * left;
      } catch {
        // The hub is away; the end that was told stays.
      }
    };

    const look = async () => {
      if (Date.now() - asked >= 1000 * ASK) {
        asked = Date.now();
        await ask();
      }
      if (end === null) return;
      const left = (end - Date.now()) / 1000, soon = left <= WARN;
      text.textContent = inWords(left);
      text.style.fontWeight = soon ? "bold" : "";
      if (soon && !warned) {
        Notification.warning(
          // JupyterLab cuts what is longer than 140 letters.
          `${inWords(left)}. Then the kernels end, with their variables. Notebooks are saved before.`,
          { autoClose: false },
        );
      }
      if ((soon && !warned) || (left <= LAST && left > -LOOK)) save(app);
      warned = soon;
    };

    bar.registerStatusItem(`${NAME}:item`, { item, align: "right", rank: 0 });
    look();
    setInterval(look, 1000 * LOOK);
  };

  // What webpack makes of an extension: JupyterLab hands its own modules in, and takes the plugin out.
  let modules;
  const take = async name => (await Object.values(modules[name])[0].get())();
  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB[NAME] = {
    init: shared => { modules = shared; },
    get: async () => {
      const names = ["statusbar", "apputils", "coreutils"].map(name => `@jupyterlab/${name}`);
      const [{ IStatusBar }, ...others] = await Promise.all([...names, "@lumino/widgets"].map(take));
      const plugin = {
        id: `${NAME}:plugin`,
        autoStart: true,
        requires: [IStatusBar],
        activate: (app, bar) => activate(app, bar, ...others),
      };
      return () => ({ __esModule: true, default: plugin });
    },
  };
})();
