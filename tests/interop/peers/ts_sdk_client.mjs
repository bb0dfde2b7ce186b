// A client on the official TypeScript SDK that plays every scene with an agent.
//
// `node ts_sdk_client.mjs SDK CWD AGENT [ARGUMENT ...]` prints one JSON object, a member for each step;
// what a step cannot do is its `failed`. test_our_agent.py asserts what is in it.
import { spawn } from "node:child_process";
import { once } from "node:events";
import fs from "node:fs";
import path from "node:path";
import process from "node:process";
import { Readable, Writable } from "node:stream";
import { loadSdk, SCRIPT } from "./ts_common.mjs";

const [sdk, CWD, ...AGENT] = process.argv.slice(2);
const acp = await loadSdk(sdk);
const { agent: A, client: C } = acp.methods;
const { RequestError } = acp;

const asText = (text) => [{ type: "text", text }];
const textOf = (update) => update?.content?.text;

/** What a call is refused with. */
const refusal = (call) =>
  call.then(
    (result) => ({ result }),
    ({ code, message, data = null }) => ({ code, message, data }),
  );

/** A promise and what settles it. */
function later() {
  const made = {};
  made.promise = new Promise((resolve) => { made.resolve = resolve; });
  return made;
}

const onPath = (command) =>
  process.env.PATH.split(path.delimiter).some((folder) => fs.existsSync(path.join(folder, command)));

// ------------------------------------------------------------ what this client lends

class Command {
  output = Buffer.alloc(0);
  truncated = false;
  status = null;

  constructor(child, limit) {
    this.child = child;
    const take = (chunk) => {
      this.output = Buffer.concat([this.output, chunk]);
      if (limit != null && this.output.length > limit) {
        this.truncated = true;
        this.output = this.output.subarray(this.output.length - limit);
        // Not in the middle of a character.
        while ((this.output[0] & 0xc0) === 0x80) this.output = this.output.subarray(1);
      }
    };
    child.stdout.on("data", take);
    this.ended = once(child, "close").then(([exitCode, signal]) => {
      this.status = { exitCode, signal };
      return this.status;
    });
  }

  kill() {
    if (this.status === null) process.kill(-this.child.pid, "SIGKILL");
  }
}

class Host {
  updates = new Map();
  watchers = new Set();
  decision = "yes";
  asked = [];
  beingAsked = later();
  thinking = null;
  form = SCRIPT.answer;
  elicited = [];
  ticks = [];
  commands = new Map();
  /** What the handler of an update waits for before it notes the update, by its text. */
  waits = new Map();

  of(sessionId) {
    if (!this.updates.has(sessionId)) this.updates.set(sessionId, []);
    return this.updates.get(sessionId);
  }

  /** Wait until an update of the session is what is looked for. */
  seen(sessionId, found) {
    return new Promise((resolve) => {
      const look = () => {
        if (!this.of(sessionId).some(found)) return;
        this.watchers.delete(look);
        resolve();
      };
      this.watchers.add(look);
      look();
    });
  }

  path(name) {
    const real = path.normalize(name);
    if (!path.isAbsolute(name) || path.relative(CWD, real).startsWith("..")) {
      throw RequestError.invalidParams({ path: name });
    }
    return real;
  }

  command(terminalId) {
    const command = this.commands.get(terminalId);
    if (!command) throw RequestError.resourceNotFound(terminalId);
    return command;
  }

  left() {
    return [...this.commands].filter(([, command]) => command).map(([name]) => name);
  }

  app() {
    return acp
      .client({ name: SCRIPT.client.name })
      .onNotification(C.session.update, async ({ params }) => {
        await this.waits.get(textOf(params.update))?.promise;
        this.of(params.sessionId).push(params.update);
        for (const look of [...this.watchers]) look();
      })
      .onRequest(C.session.requestPermission, async ({ params }) => {
        this.asked.push(params);
        this.beingAsked.resolve();
        await this.thinking?.promise;
        return {
          outcome:
            this.decision === null
              ? { outcome: "cancelled" }
              : { outcome: "selected", optionId: this.decision },
        };
      })
      .onRequest(C.fs.readTextFile, ({ params }) => {
        const name = this.path(params.path);
        if (!fs.existsSync(name)) throw RequestError.resourceNotFound(name);
        const content = fs.readFileSync(name, "utf8");
        if (params.line == null && params.limit == null) return { content };
        const start = (params.line ?? 1) - 1;
        const lines = content.split("\n").slice(start, start + (params.limit ?? Infinity));
        return { content: lines.map((line) => `${line}\n`).join("") };
      })
      .onRequest(C.fs.writeTextFile, ({ params }) => {
        const name = this.path(params.path);
        fs.mkdirSync(path.dirname(name), { recursive: true });
        fs.writeFileSync(name, params.content);
        return {};
      })
      .onRequest(C.terminal.create, ({ params }) => {
        const env = Object.fromEntries((params.env ?? []).map(({ name, value }) => [name, value]));
        if (!onPath(params.command)) throw RequestError.invalidParams({ command: params.command });
        // The shell joins both outputs, so that they are in order.
        const line = 'exec "$0" "$@" 2>&1';
        const child = spawn("sh", ["-c", line, params.command, ...(params.args ?? [])], {
          cwd: params.cwd ?? CWD,
          env: { ...process.env, ...env },
          stdio: ["ignore", "pipe", "inherit"],
          detached: true,
        });
        const terminalId = `terminal-${this.commands.size}`;
        this.commands.set(terminalId, new Command(child, params.outputByteLimit));
        return { terminalId };
      })
      .onRequest(C.terminal.output, ({ params }) => {
        const { output, truncated, status } = this.command(params.terminalId);
        return {
          output: output.toString("utf8"),
          truncated,
          ...(status === null ? {} : { exitStatus: status }),
        };
      })
      .onRequest(C.terminal.waitForExit, ({ params }) => this.command(params.terminalId).ended)
      .onRequest(C.terminal.kill, ({ params }) => {
        this.command(params.terminalId).kill();
        return {};
      })
      .onRequest(C.terminal.release, async ({ params }) => {
        const command = this.command(params.terminalId);
        this.commands.set(params.terminalId, null);
        command.kill();
        await command.ended;
        return {};
      })
      .onRequest(C.elicitation.create, ({ params }) => {
        const { message, sessionId, requestedSchema } = params;
        this.elicited.push({ message, sessionId, requestedSchema });
        return this.form ? { action: "accept", content: this.form } : { action: "decline" };
      })
      .onRequest("_interop/echo", (raw) => raw, ({ method, params }) => ({ method, params }))
      .onNotification("*", ({ method, params }) => {
        this.ticks.push([method, params]);
      });
  }
}

// ------------------------------------------------------------ an agent that was started

class Link {
  constructor(agent, host, initialized) {
    this.agent = agent;
    this.host = host;
    this.initialized = initialized;
  }

  /** Start an agent, run `work` with it, and tell how its process ended. */
  static async with(clientCapabilities, work) {
    const child = spawn(AGENT[0], AGENT.slice(1), { stdio: ["pipe", "pipe", "inherit"] });
    const exit = once(child, "exit");
    const stream = acp.ndJsonStream(Writable.toWeb(child.stdin), Readable.toWeb(child.stdout));
    const host = new Host();
    const connection = host.app().connectWith(stream, async (agent) => {
      const initialized = await agent.request(A.initialize, {
        protocolVersion: acp.PROTOCOL_VERSION,
        clientCapabilities,
        clientInfo: SCRIPT.client,
      });
      await work(new Link(agent, host, initialized));
    });
    // Rejects when the agent goes first; what was not done by then is missing from the report.
    await connection.catch((error) => console.error(error));
    for (const command of host.commands.values()) command?.kill();
    child.stdin.end();
    const timer = setTimeout(() => child.kill("SIGKILL"), 5000);
    const [code, signal] = await exit;
    clearTimeout(timer);
    return signal === null ? code : "did not end";
  }

  async opened(cwd = CWD, more = {}) {
    const { sessionId } = await this.agent.request(A.session.new, { cwd, mcpServers: [], ...more });
    await this.host.seen(sessionId, (u) => u.sessionUpdate === "available_commands_update");
    return sessionId;
  }

  prompt(sessionId, prompt, more = {}) {
    return this.agent.request(A.session.prompt, { sessionId, prompt, ...more });
  }

  /**
   * A whole turn: its answer and its updates. Taken from an `ActiveSession`, whose queue has the
   * updates before the answer; a notification handler may run after the answer was handed over.
   */
  async turn(sessionId, prompt) {
    const session = this.agent.attachSession({ sessionId });
    try {
      const answer = session.prompt(prompt);
      const updates = [];
      for (;;) {
        const message = await session.nextUpdate();
        if (message.kind === "stop") return { response: await answer, updates };
        updates.push(message.update);
      }
    } finally {
      session.dispose();
    }
  }

  async told(sessionId, prompt) {
    const { updates } = await this.turn(sessionId, prompt);
    return JSON.parse(textOf(updates.at(-1)));
  }

  started(sessionId) {
    return this.host.seen(sessionId, (u) => textOf(u) === "started");
  }

  cancel(sessionId) {
    return this.agent.notify(A.session.cancel, { sessionId });
  }
}

// ------------------------------------------------------------ the steps

const STEPS = {
  initialize: async (link) => link.initialized,

  async new({ agent, host }) {
    const more = path.join(CWD, "more");
    fs.mkdirSync(more, { recursive: true });
    const response = await agent.request(A.session.new, {
      cwd: CWD,
      mcpServers: [{ name: "files", command: "/bin/true", args: [], env: [] }],
      additionalDirectories: [more],
    });
    const { sessionId } = response;
    await host.seen(sessionId, (u) => u.availableCommands);
    const answer = await agent.request(A.session.prompt, {
      sessionId,
      prompt: asText("state"),
      _meta: { traceparent: "00-1", x: [1, { y: null }] },
    });
    await host.seen(sessionId, textOf);
    const updates = host.of(sessionId);
    return {
      response,
      updates: updates.slice(0, -1),
      state: JSON.parse(textOf(updates.at(-1))),
      stop: answer.stopReason,
    };
  },

  stream: async (link) => link.turn(await link.opened(), "stream"),

  echo: async (link) => link.turn(await link.opened(), SCRIPT.blocks),

  async burst(link) {
    const { updates } = await link.turn(await link.opened(), "burst 1000");
    return updates.map(textOf).join("");
  },

  async big(link) {
    const session = await link.opened();
    const long = `echo ${"ö".repeat(300_000)}`;
    const turns = [
      [await link.turn(session, "big 300000"), "ä".repeat(300_000)],
      [await link.turn(session, long), long],
    ];
    return turns.flatMap(([turn, text]) => turn.updates.map((u) => textOf(u) === text));
  },

  async permission(link) {
    const session = await link.opened();
    const report = {};
    for (const decision of ["yes", "always", "no", "not offered", null]) {
      link.host.decision = decision;
      const turn = await link.turn(session, "permission");
      report[decision ?? "None"] = { ...turn, asked: link.host.asked.pop() };
    }
    link.host.decision = "yes";
    return report;
  },

  files: async (link) => link.told(await link.opened(), "files ü\u2028\r\n"),

  async terminal(link) {
    const turn = await link.turn(await link.opened(), "terminal");
    return { ...turn, left: link.host.left() };
  },

  async kill(link) {
    const told = await link.told(await link.opened(), "kill");
    return { ...told, left: link.host.left() };
  },

  async cancel(link) {
    const session = await link.opened();
    const turn = link.turn(session, "slow");
    await link.started(session);
    await link.cancel(session);
    return { turn: await turn, after: await link.turn(session, "echo") };
  },

  async cancel_permission(link) {
    const { host } = link;
    const session = await link.opened();
    host.thinking = later();
    host.decision = null;
    host.beingAsked = later();
    const turn = link.turn(session, "permission");
    await host.beingAsked.promise;
    await link.cancel(session);
    host.thinking.resolve();
    const report = await turn;
    host.thinking = null;
    host.decision = "yes";
    return report;
  },

  async cancel_command(link) {
    const session = await link.opened();
    const turn = link.turn(session, "busy");
    await link.started(session);
    await link.cancel(session);
    return { ...(await turn), left: link.host.left() };
  },

  async modes(link) {
    const { agent } = link;
    const sessionId = await link.opened();
    const mode = (modeId) => agent.request(A.session.setMode, { sessionId, modeId });
    const option = (configId, value) =>
      agent.request(A.session.setConfigOption, {
        sessionId,
        configId,
        ...(typeof value === "boolean" ? { type: "boolean" } : {}),
        value,
      });
    await mode("code");
    await option("model", "deep");
    const last = await option("verbose", true);
    return {
      options: last.configOptions,
      "unknown mode": await refusal(mode("zz")),
      "unknown option": await refusal(option("zz", "deep")),
      "unknown value": await refusal(option("model", "zz")),
      state: await link.told(sessionId, "state"),
    };
  },

  async extension(link) {
    const { agent, host } = link;
    const sessionId = await link.opened();
    const params = { a: [1, null, { ü: true }] };
    const echo = await agent.request("_interop/echo", params);
    const nothing = await agent.request("_interop/null", {});
    const unknown = await refusal(agent.request("_interop/unknown", {}));
    await agent.notify("_interop/tick", { n: 2 });
    await agent.notify("_interop/nobody", {});
    const told = await link.told(sessionId, "extension");
    await agent.notify("_interop/poke", { sessionId, title: "Poked" });
    await host.seen(sessionId, (u) => u.title === "Poked");
    const state = await link.told(sessionId, "state");
    return { echo, null: nothing, unknown, told, ticks: host.ticks, state: state.told };
  },

  async elicit(link) {
    const { host } = link;
    const session = await link.opened();
    const accepted = await link.told(session, "elicit");
    host.form = null;
    const declined = await link.told(session, "elicit");
    host.form = SCRIPT.answer;
    return { accepted, declined, elicited: host.elicited };
  },

  async side_by_side(link) {
    const sessions = [await link.opened(), await link.opened(), await link.opened()];
    const slow = link.turn(sessions[0], "slow");
    await link.started(sessions[0]);
    const bursts = await Promise.all(sessions.slice(1).map((name) => link.turn(name, "burst 200")));
    await link.cancel(sessions[0]);
    await slow;
    return bursts.map(({ updates }) => updates.map(textOf).join(""));
  },

  async errors(link) {
    const { agent } = link;
    const session = await link.opened();
    const prompt = (text, name = session) => refusal(link.prompt(name, asText(text)));
    const opening = (params) => refusal(agent.request(A.session.new, { mcpServers: [], ...params }));
    const slow = link.turn(session, "slow");
    await link.started(session);
    const second = await prompt("echo");
    await link.cancel(session);
    await slow;
    return {
      "second prompt": second,
      "own error": await prompt("fail"),
      crash: await prompt("crash"),
      "unknown session": await prompt("echo", "no such session"),
      "unknown scene": await prompt("no-such-scene"),
      audio: await refusal(
        link.prompt(session, [{ type: "audio", data: "c291bmQ=", mimeType: "audio/wav" }]),
      ),
      "relative cwd": await opening({ cwd: "here" }),
      "relative directory": await opening({ cwd: CWD, additionalDirectories: ["more"] }),
      "unknown method": await refusal(agent.request("no/such", {})),
      "no prompt": await refusal(agent.request(A.session.prompt, { sessionId: session })),
      "text for blocks": await refusal(link.prompt(session, "x")),
      "no cwd": await opening({}),
      "second initialize": await refusal(
        agent.request(A.initialize, { protocolVersion: acp.PROTOCOL_VERSION }),
      ),
      "mode of nobody": await refusal(
        agent.request(A.session.setMode, { sessionId: "no such session", modeId: "code" }),
      ),
      after: (await link.turn(session, "echo")).updates,
    };
  },

  async stops(link) {
    const session = await link.opened();
    const reasons = [];
    for (const reason of ["max_tokens", "max_turn_requests", "refusal"]) {
      reasons.push((await link.turn(session, `stop ${reason}`)).response.stopReason);
    }
    return reasons;
  },

  async auth(link) {
    const { agent } = link;
    await agent.request(A.logout, {});
    const signedOut = await refusal(agent.request(A.session.new, { cwd: CWD, mcpServers: [] }));
    const unknown = await refusal(agent.request(A.authenticate, { methodId: "zz" }));
    await agent.request(A.authenticate, { methodId: "login" });
    return {
      "signed out": signedOut,
      "unknown method": unknown,
      after: (await link.turn(await link.opened(), "echo")).updates,
    };
  },

  async sessions(link) {
    const { agent } = link;
    const folder = path.join(CWD, "folder");
    fs.mkdirSync(folder, { recursive: true });
    const names = [];
    for (let n = 0; n < 4; n++) names.push(await link.opened(folder));
    await link.turn(names[0], "stream");
    const list = (params) => agent.request(A.session.list, params);
    const close = (sessionId) => agent.request(A.session.close, { sessionId });
    const pages = [];
    for (let cursor = null; ; ) {
      const page = await list({ cwd: folder, ...(cursor === null ? {} : { cursor }) });
      pages.push(page.sessions);
      cursor = page.nextCursor ?? null;
      if (cursor === null) break;
    }
    await close(names[1]);
    const slow = link.turn(names[2], "slow");
    await link.started(names[2]);
    const closing = close(names[2]);
    const ended = await slow;
    await closing;
    const deleted = [];
    for (let n = 0; n < 2; n++) {
      deleted.push(await agent.request(A.session.delete, { sessionId: names[3] }));
    }
    const left = await list({ cwd: folder, cursor: "2" });
    return {
      names,
      pages,
      nowhere: await list({ cwd: "/nowhere" }),
      garbage: await refusal(list({ cursor: "garbage" })),
      closed: await refusal(link.prompt(names[1], asText("echo"))),
      "close again": await refusal(close(names[1])),
      "closed while running": ended,
      deleted,
      left: left.sessions.map(({ sessionId }) => sessionId),
    };
  },
};

// Handlers that take their time: whether the next one waits, and whether an answer does.
STEPS.handlers = async (link) => {
  const { agent, host } = link;
  const sessionId = await link.opened();
  let first = later();
  host.waits.set("0 ", first);
  const from = host.of(sessionId).length;
  const turn = link.turn(sessionId, "burst 2");
  await host.seen(sessionId, (u) => textOf(u) === "1 ");
  await turn; // does not wait for the handlers
  first.resolve();
  await host.seen(sessionId, (u) => textOf(u) === "0 ");
  const noted = host.of(sessionId).slice(from).map(textOf);
  await agent.request(A.session.close, { sessionId });
  host.of(sessionId).length = 0;
  first = later();
  host.waits.set("0 ", first);
  await agent.request(A.session.load, { sessionId, cwd: CWD, mcpServers: [] });
  const atAnswer = host.of(sessionId).length;
  first.resolve();
  await host.seen(sessionId, (u) => textOf(u) === "0 ");
  return {
    noted,
    "noted at the answer": atAnswer,
    "noted at last": host.of(sessionId).map(textOf),
  };
};

/** What the next process makes of the sessions that the step `sessions` left. */
async function reopen(link, sessionId) {
  const { agent, host } = link;
  const folder = path.join(CWD, "folder");
  const load = (params) =>
    agent.request(A.session.load, { sessionId, cwd: folder, mcpServers: [], ...params });
  const session = agent.attachSession({ sessionId });
  const loaded = await load({});
  // The queue has what was replayed, then what the next turn says, then its end.
  void session.prompt("echo");
  const updates = [];
  for (;;) {
    const message = await session.nextUpdate();
    if (message.kind === "stop") break;
    updates.push(message.update);
  }
  session.dispose();
  await agent.request(A.session.close, { sessionId });
  host.updates.clear();
  const resumed = await agent.request(A.session.resume, { sessionId, cwd: folder, mcpServers: [] });
  return {
    loaded,
    replayed: updates.slice(0, -1),
    echoed: updates.slice(-1),
    resumed,
    "after resume": [...host.updates.keys()],
    unknown: await refusal(load({ sessionId: "no such session" })),
    elsewhere: await refusal(load({ cwd: CWD })),
  };
}

async function death(link) {
  const session = await link.opened();
  try {
    await link.prompt(session, asText("exit"));
  } catch (error) {
    return { error: error.name, last: textOf(link.host.of(session).at(-1)) };
  }
  return null;
}

const ALL = {
  fs: { readTextFile: true, writeTextFile: true },
  terminal: true,
  elicitation: { form: {} },
  session: { configOptions: { boolean: {} } },
};
const report = {};

async function note(name, call) {
  try {
    report[name] = await call;
  } catch (error) {
    report[name] = { failed: `${error.name}: ${error.message}` };
  }
}

report.exit = await Link.with(ALL, async (link) => {
  for (const [name, step] of Object.entries(STEPS)) await note(name, step(link));
});
report["death exit"] = await Link.with({}, async (bare) => {
  const session = await bare.agent.request(A.session.new, { cwd: CWD, mcpServers: [] });
  report.bare = {
    options: session.configOptions,
    tools: await bare.told(session.sessionId, "tools"),
    elicit: await refusal(bare.prompt(session.sessionId, asText("elicit"))),
  };
  await note("reopened", reopen(bare, report.sessions.names[0]));
  await note("death", death(bare));
});
process.stdout.write(`${JSON.stringify(report)}\n`);
