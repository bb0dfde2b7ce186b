// The scripted agent on the official TypeScript SDK.
//
// `node ts_sdk_agent.mjs SDK STATE`: SDK is its folder, STATE a JSON file that keeps the sessions for
// the next process. What it plays is told by the first word of the prompt; README.md lists the scenes.
import fs from "node:fs";
import path from "node:path";
import process from "node:process";
import { Readable, Writable } from "node:stream";
import { loadSdk, SCRIPT } from "./ts_common.mjs";

const [sdk, STATE] = process.argv.slice(2);
const acp = await loadSdk(sdk);
const { agent: A, client: C } = acp.methods;
const { RequestError } = acp;

const copy = (value) => JSON.parse(JSON.stringify(value));
const text = (value) => ({
  sessionUpdate: "agent_message_chunk",
  content: { type: "text", text: typeof value === "string" ? value : JSON.stringify(value) },
});

// ------------------------------------------------------------ what is kept

const sessions = new Map();
const told = [];
let signedIn = true;
let peer = null;

const saved = () => (fs.existsSync(STATE) ? JSON.parse(fs.readFileSync(STATE, "utf8")) : {});
const store = (all) => fs.writeFileSync(STATE, JSON.stringify(all));

function save(session) {
  const { cwd, more, title, history } = session;
  store({ ...saved(), [session.id]: { cwd, more, title, history } });
}

function open(id, cwd, more, servers = []) {
  const session = {
    id,
    cwd,
    more: more ?? [],
    servers: servers.map((server) => server.name),
    title: null,
    history: [],
    mode: SCRIPT.modes.currentModeId,
    options: copy(SCRIPT.config_options),
    running: null,
  };
  sessions.set(id, session);
  return session;
}

const setup = (session) => ({
  modes: { ...SCRIPT.modes, currentModeId: session.mode },
  configOptions: session.options,
});

function find(id) {
  const session = sessions.get(id);
  if (!session) throw RequestError.sessionNotFound(id);
  return session;
}

function reopen({ sessionId, cwd, additionalDirectories }) {
  const kept = saved()[sessionId];
  if (!kept) throw RequestError.sessionNotFound(sessionId);
  if (kept.cwd !== cwd) throw RequestError.invalidParams({ cwd });
  return Object.assign(open(sessionId, cwd, additionalDirectories), {
    history: kept.history,
    title: kept.title,
  });
}

// ------------------------------------------------------------ the scenes

function stage(session, client, params) {
  const { id: sessionId, cwd } = session;
  // Not awaited: the SDK keeps the order in which it was called.
  const send = (update, keep = true) => {
    if (keep) session.history.push(update);
    return client.notify(C.session.update, { sessionId, update });
  };
  const say = (value) => send(text(value));
  const ask = (method, more) => client.request(method, { sessionId, ...more });
  const code = (promise) =>
    promise.then(
      () => null,
      (error) => error.code,
    );
  const running = async () => {
    const terminal = await client.createTerminal({
      sessionId,
      command: "sh",
      args: ["-c", "echo ready; exec sleep 300"],
    });
    for (;;) {
      const seen = await terminal.currentOutput();
      if (seen.output.includes("ready")) return [terminal, seen];
    }
  };

  return {
    stream() {
      for (const update of SCRIPT.stream) {
        send(JSON.parse(JSON.stringify(update).replaceAll("{cwd}", cwd)));
      }
      session.title = "A scripted turn";
      return {
        usage: { totalTokens: 30, inputTokens: 10, outputTokens: 20, thoughtTokens: 5 },
      };
    },

    echo() {
      for (const content of params.prompt) {
        send({ sessionUpdate: "agent_message_chunk", content });
      }
    },

    state() {
      say({
        client: peer,
        cwd,
        more: session.more,
        servers: session.servers,
        mode: session.mode,
        options: Object.fromEntries(session.options.map((o) => [o.id, o.currentValue])),
        meta: params._meta ?? {},
        told,
      });
    },

    burst(count) {
      for (let n = 0; n < Number(count); n++) say(`${n} `);
    },

    big(count) {
      say("ä".repeat(Number(count)));
    },

    // What no schema knows (yet): a kind, and a known kind without what it must have.
    future() {
      send({ sessionUpdate: "hologram", beam: [1, 2] });
      send({ sessionUpdate: "tool_call", title: "no id" });
      send({ ...text("after"), zzz: { unknown: "member" } });
    },

    async permission() {
      const { toolCall, options } = SCRIPT.permission;
      send({ sessionUpdate: "tool_call", ...toolCall });
      const { outcome } = await ask(C.session.requestPermission, { toolCall, options });
      const allowed = ["yes", "always"].includes(outcome.optionId);
      send({
        sessionUpdate: "tool_call_update",
        toolCallId: toolCall.toolCallId,
        status: allowed ? "completed" : "failed",
      });
      say(outcome);
      return outcome.outcome === "cancelled" ? { stopReason: "cancelled" } : {};
    },

    async files(prefix) {
      const read = (file, more) => ask(C.fs.readTextFile, { path: file, ...more });
      const whole = await read(`${cwd}/notes.txt`);
      const part = await read(`${cwd}/notes.txt`, { line: 2, limit: 1 });
      await ask(C.fs.writeTextFile, {
        path: `${cwd}/new/copy.txt`,
        content: prefix + whole.content,
      });
      const again = await read(`${cwd}/new/copy.txt`);
      say({
        whole: whole.content,
        part: part.content,
        again: again.content,
        missing: await code(read(`${cwd}/missing.txt`)),
        relative: await code(read("notes.txt")),
        outside: await code(read("/etc/hostname")),
        "write outside": await code(
          ask(C.fs.writeTextFile, { path: `${cwd}/../escaped.txt`, content: "x" }),
        ),
      });
    },

    async tools() {
      say({
        read: await code(ask(C.fs.readTextFile, { path: `${cwd}/notes.txt` })),
        write: await code(ask(C.fs.writeTextFile, { path: `${cwd}/x.txt`, content: "x" })),
        terminal: await code(ask(C.terminal.create, { command: "true" })),
      });
    },

    async terminal() {
      const terminal = await client.createTerminal({
        sessionId,
        command: "sh",
        args: ["-c", 'printf "%s " "$WORD" ü; pwd; echo err >&2; exit 3'],
        env: [{ name: "WORD", value: "a b" }],
      });
      send({
        sessionUpdate: "tool_call",
        toolCallId: "term1",
        title: "sh",
        kind: "execute",
        status: "in_progress",
        content: [{ type: "terminal", terminalId: terminal.id }],
      });
      const exit = await terminal.waitForExit();
      const output = await terminal.currentOutput();
      await terminal.release();
      const limited = await client.createTerminal({
        sessionId,
        command: "printf",
        args: ["äöü%s", "äöü"],
        outputByteLimit: 5,
      });
      await limited.waitForExit();
      const tail = await limited.currentOutput();
      await limited.release();
      say({
        id: terminal.id,
        exit,
        output,
        released: await code(terminal.currentOutput()),
        limited: tail,
        "missing command": await code(ask(C.terminal.create, { command: "no-such-command-here" })),
      });
    },

    async kill() {
      const [terminal, before] = await running();
      const waiting = Promise.all([terminal.waitForExit(), terminal.waitForExit()]);
      await terminal.kill();
      const ended = await waiting;
      const after = await terminal.currentOutput();
      await terminal.release();
      const [other] = await running();
      const wait = other.waitForExit();
      await other.release();
      say({ before, ended, after, released: await wait, gone: await code(other.kill()) });
    },

    async slow() {
      say("started");
      await session.running.cancelled;
      say("stopping");
      return { stopReason: "cancelled" };
    },

    async extension() {
      const answer = await client.request("_interop/echo", { a: [1, null, { ü: true }] });
      await client.notify("_interop/tick", { n: 1 });
      const unknown = await code(client.request("_interop/unknown", {}));
      say({ answer, unknown });
    },

    async elicit() {
      say(await ask(C.elicitation.create, { mode: "form", ...SCRIPT.elicitation }));
    },

    stop: (reason) => ({ stopReason: reason }),

    fail() {
      throw new RequestError(4242, "Out of quota", { left: 0 });
    },

    crash() {
      throw new Error("a secret");
    },

    async exit() {
      await say("going");
      fs.writeSync(2, "last words\n");
      process.exit(7);
    },
  };
}

// ------------------------------------------------------------ the agent

acp
  .agent({ name: SCRIPT.agent.name })
  .onRequest(A.initialize, ({ params }) => {
    peer = { capabilities: params.clientCapabilities, info: params.clientInfo };
    return {
      protocolVersion: Math.min(params.protocolVersion, acp.PROTOCOL_VERSION),
      agentCapabilities: {
        loadSession: true,
        promptCapabilities: { image: true, embeddedContext: true },
        sessionCapabilities: { list: {}, resume: {}, close: {}, delete: {}, additionalDirectories: {} },
        auth: { logout: {} },
      },
      authMethods: SCRIPT.auth_methods,
      agentInfo: SCRIPT.agent,
    };
  })
  .onRequest(A.authenticate, ({ params }) => {
    if (params.methodId !== "login") throw RequestError.invalidParams({ methodId: params.methodId });
    signedIn = true;
  })
  .onRequest(A.logout, () => {
    signedIn = false;
  })
  .onRequest(A.session.new, async ({ params, client }) => {
    if (!signedIn) throw RequestError.authRequired({ authMethods: ["login"] });
    if (!path.isAbsolute(params.cwd)) throw RequestError.invalidParams({ path: params.cwd });
    const id = `session-${Object.keys(saved()).length + 1}`;
    const session = open(id, params.cwd, params.additionalDirectories, params.mcpServers);
    save(session);
    // Before the response, as several real agents do.
    await client.notify(C.session.update, {
      sessionId: id,
      update: { sessionUpdate: "available_commands_update", availableCommands: SCRIPT.commands },
    });
    return { sessionId: id, ...setup(session) };
  })
  .onRequest(A.session.load, async ({ params, client }) => {
    const session = reopen(params);
    for (const update of session.history) {
      await client.notify(C.session.update, { sessionId: session.id, update });
    }
    return setup(session);
  })
  .onRequest(A.session.resume, ({ params }) => setup(reopen(params)))
  .onRequest(A.session.list, ({ params }) => {
    const found = Object.entries(saved())
      .filter(([, kept]) => kept && (params.cwd == null || kept.cwd === params.cwd))
      .map(([sessionId, { cwd, title }]) => ({ sessionId, cwd, title }));
    const start = Number(params.cursor ?? 0);
    if (!Number.isInteger(start)) throw RequestError.invalidParams({ cursor: params.cursor });
    return {
      sessions: found.slice(start, start + 2),
      ...(start + 2 < found.length ? { nextCursor: String(start + 2) } : {}),
    };
  })
  .onRequest(A.session.close, async ({ params }) => {
    const session = find(params.sessionId);
    session.running?.cancel();
    await session.running?.ended;
    sessions.delete(session.id);
  })
  .onRequest(A.session.delete, ({ params }) => {
    sessions.delete(params.sessionId);
    // Kept as nothing, so that its id is not given again.
    store({ ...saved(), [params.sessionId]: null });
  })
  .onRequest(A.session.setMode, ({ params }) => {
    const session = find(params.sessionId);
    if (!SCRIPT.modes.availableModes.some((mode) => mode.id === params.modeId)) {
      throw RequestError.invalidParams({ modeId: params.modeId });
    }
    session.mode = params.modeId;
  })
  .onRequest(A.session.setConfigOption, ({ params }) => {
    const session = find(params.sessionId);
    const option = session.options.find((o) => o.id === params.configId);
    const valid =
      option?.type === "boolean"
        ? typeof params.value === "boolean"
        : option?.options.some((choice) => choice.value === params.value);
    if (!valid) throw RequestError.invalidParams({ configId: params.configId });
    option.currentValue = params.value;
    return { configOptions: session.options };
  })
  .onNotification(A.session.cancel, ({ params }) => sessions.get(params.sessionId)?.running?.cancel())
  .onRequest(A.session.prompt, async ({ params, client }) => {
    const session = find(params.sessionId);
    if (session.running) throw RequestError.invalidRequest({ sessionId: session.id });
    for (const content of params.prompt) {
      session.history.push({ sessionUpdate: "user_message_chunk", content });
    }
    const [, name, rest] = /^(\S*) ?(.*)$/s.exec(params.prompt[0].text);
    const scene = stage(session, client, params)[name];
    if (!scene) throw RequestError.invalidParams({ scene: name });
    const running = {};
    running.cancelled = new Promise((resolve) => { running.cancel = resolve; });
    running.ended = new Promise((resolve) => { running.end = resolve; });
    session.running = running;
    try {
      return { stopReason: "end_turn", ...(await scene(rest)) };
    } finally {
      save(session);
      session.running = null;
      running.end();
    }
  })
  .onRequest("_interop/echo", (raw) => raw, ({ method, params }) => ({ method, params }))
  .onRequest("_interop/null", (raw) => raw, () => null)
  .onNotification("*", ({ method, params, client }) => {
    told.push([method, params]);
    if (method !== "_interop/poke") return undefined;
    return client.notify(C.session.update, {
      sessionId: params.sessionId,
      update: { sessionUpdate: "session_info_update", title: params.title },
    });
  })
  .connect(acp.ndJsonStream(Writable.toWeb(process.stdout), Readable.toWeb(process.stdin)));
