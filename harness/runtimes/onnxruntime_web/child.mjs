// Serves one session of onnxruntime-web: a JSON request on each line of stdin, its reply on a line of stdout.
// Arrays are {type, dims, data}, with bytes in base64. The same program runs in Node.js and in the page of a browser,
// where the copy in Node.js serves the files and relays the lines.
const inNode = typeof process !== 'undefined';
const printed = []; // WebAssembly prints profiles, in Node.js to the file descriptor of stdout
console.log = (...texts) => void printed.push(texts.join(' '));

const decode = inNode
  ? (text) => new Uint8Array(Buffer.from(text, 'base64'))
  : async (text) => new Uint8Array(await (await fetch(`data:;base64,${text}`)).arrayBuffer());
const encode = inNode
  ? (bytes) => Buffer.from(bytes).toString('base64')
  : async (bytes) => {
      const reader = new FileReader();
      await new Promise((done) => ((reader.onload = done), reader.readAsDataURL(new Blob([bytes]))));
      return reader.result.split(',')[1] ?? '';
    };
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: globalThis.Float16Array ?? Uint16Array, bool: Uint8Array,
  int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array,
  int64: BigInt64Array, uint64: BigUint64Array,
};

let ort, session, fixed;
let stop = () => process.exit(0);

async function readTensors(arrays) {
  const tensors = {};
  for (const [name, { type, dims, data }] of Object.entries(arrays)) {
    tensors[name] = new ort.Tensor(type, new ARRAYS[type]((await decode(data)).buffer), dims);
  }
  return tensors;
}

const operations = {
  facts: () => ({ version: ort.env.versions.web, engine: inNode ? `Node.js ${process.versions.node}` : browserName() }),
  async load({ model, options }) {
    session = await ort.InferenceSession.create(await decode(model), options);
    return { inputs: session.inputMetadata };
  },
  async bind({ inputs }) {
    fixed = await readTensors(inputs);
    return {};
  },
  async sample({ n }) {
    const times = [];
    for (let index = 0; index < n; index++) {
      const start = performance.now();
      await session.run(fixed);
      times.push(performance.now() - start);
    }
    return { times };
  },
  async infer({ inputs }) {
    const feeds = await readTensors(inputs);
    const start = performance.now();
    const found = await session.run(feeds);
    const outputs = {}, time = performance.now() - start;
    for (const [name, { type, dims, data }] of Object.entries(found)) {
      const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
      outputs[name] = { type, dims, data: await encode(bytes) };
    }
    return { outputs, time };
  },
  async profile() {
    printed.length = 0;
    session.endProfiling();
    return { trace: printed.join('\n') };
  },
};

async function answer(line) {
  try {
    const { op, ...request } = JSON.parse(line);
    return JSON.stringify(await (op === 'start' ? start(request) : operations[op](request)));
  } catch (error) {
    return JSON.stringify({ error: String(error?.message ?? error) });
  }
}

async function start({ folder, chromium, profile, program }) {
  const { createRequire } = await import('node:module');
  const require = createRequire(`${folder}/`);
  if (chromium) {
    const { dirname } = await import('node:path');
    const send = await openBrowser(dirname(require.resolve('onnxruntime-web')), chromium, profile, program);
    for (const op of Object.keys(operations)) operations[op] = async (request) => JSON.parse(await send({ op, ...request }));
  } else {
    const fs = require('node:fs');
    const write = fs.writeSync;
    fs.writeSync = (file, text, ...rest) => (file === 1 ? printed.push(String(text).trimEnd()) : write(file, text, ...rest));
    ort = require('onnxruntime-web');
    ort.env.wasm.numThreads = 1;
  }
  return operations.facts({});
}

let end = (text) => {
  console.error(text);
  process.exit(1);
};

async function openBrowser(dist, chromium, profile, program) {
  const { spawn } = await import('node:child_process');
  const { createServer } = await import('node:http');
  const { createReadStream } = await import('node:fs');
  const { randomUUID } = await import('node:crypto');
  const secret = `/${randomUUID()}/`; // other users of this machine reach the port too
  let poll, reply;
  const routes = {
    '': (request, response) => response.end('<!doctype html><script type="module" src="child.mjs"></script>'),
    'child.mjs': (request, response) => response.end(program),
    'alive': (request, response) => (response.write(' '), response.on('close', () => end('the page ended'))),
    'next': (request, response) => (poll ? poll(response) : (poll = response)),
    'reply': (request, response) => {
      const parts = [];
      request.on('data', (part) => parts.push(part));
      request.on('end', () => (response.end(), reply(Buffer.concat(parts).toString())));
    },
  };
  const server = createServer((request, response) => {
    const name = request.url.slice(secret.length);
    if (!request.url.startsWith(secret)) return response.writeHead(404).end();
    const type = /js$/.test(name) ? 'text/javascript' : /wasm$/.test(name) ? 'application/wasm' : 'text/html';
    // An isolated page has the finest clock that browsers offer.
    for (const [key, value] of Object.entries({
      'Content-Type': type, 'Cross-Origin-Opener-Policy': 'same-origin', 'Cross-Origin-Embedder-Policy': 'require-corp',
    })) response.setHeader(key, value);
    if (routes[name]) return routes[name](request, response);
    if (/^dist\/ort[\w.-]+$/.test(name)) return createReadStream(`${dist}/${name.slice(5)}`).pipe(response);
    return response.writeHead(404).end();
  });
  await new Promise((done) => server.listen(0, '127.0.0.1', done));
  const flags = [
    '--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-sync',
    '--disable-background-networking', '--disable-component-update', `--user-data-dir=${profile}`,
  ];
  const url = `http://127.0.0.1:${server.address().port}${secret}`;
  const browser = spawn(chromium, [...flags, url], { stdio: ['ignore', 'ignore', 'inherit'] });
  const ended = (code) => end(`${chromium} ended with status ${code}`);
  browser.on('error', (error) => end(`${chromium}: ${error.message}`)).on('exit', ended);
  process.on('exit', () => browser.kill('SIGKILL'));
  stop = () => {
    browser.off('exit', ended).on('exit', () => process.exit(0)).kill(); // it still writes to its profile
    end = () => {};
  };
  return (request) => new Promise((done) => {
    reply = done;
    const give = (response) => ((poll = undefined), response.end(JSON.stringify(request)));
    if (poll) give(poll);
    else poll = give;
  });
}

function browserName() {
  return `Chromium ${/Chrome\/([\d.]+)/.exec(navigator.userAgent)?.[1]}`;
}

if (inNode) {
  let parts = [], last = Promise.resolve();
  process.stdin.on('data', (chunk) => {
    for (let at; (at = chunk.indexOf(10)) >= 0; chunk = chunk.subarray(at + 1)) {
      const line = Buffer.concat([...parts, chunk.subarray(0, at)]).toString();
      parts = [];
      last = last.then(async () => process.stdout.write(`${await answer(line)}\n`));
    }
    parts.push(chunk);
  });
  process.stdin.on('end', () => last.then(() => stop()));
} else {
  fetch('alive');
  ort = await import(new URL('dist/ort.wasm.min.mjs', location.href));
  ort.env.wasm.numThreads = 1;
  for (;;) {
    const line = await (await fetch('next')).text();
    await fetch('reply', { method: 'POST', body: await answer(line) });
  }
}
