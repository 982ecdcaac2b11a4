// The official JavaScript SDK against a real server, found by its own variables (E2B_API_KEY, E2B_API_URL, E2B_SANDBOX_URL).

import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'

import { CommandExitError, FileNotFoundError, FilesystemEventType, NotFoundError, Sandbox, TimeoutError } from 'e2b'

let sandbox

before(async () => {
  sandbox = await Sandbox.create('base', { timeoutMs: 300_000, envs: { FROM: 'js' }, metadata: { 'k a': 'v/1' } })
})

after(async () => {
  await sandbox?.kill()
})

test('run', async () => {
  const result = await sandbox.commands.run('echo $FROM; echo err >&2; id -un', { envs: { A: 'b' }, cwd: '/tmp' })
  assert.deepEqual([result.exitCode, result.stdout, result.stderr], [0, 'js\nuser\n', 'err\n'])
  assert.equal((await sandbox.commands.run('id -u', { user: 'root' })).stdout, '0\n')
  await assert.rejects(sandbox.commands.run('echo out; exit 5'), (error) => {
    assert.ok(error instanceof CommandExitError)
    assert.deepEqual([error.exitCode, error.stdout], [5, 'out\n'])
    return true
  })
  await assert.rejects(sandbox.commands.run('exec sleep 60', { timeoutMs: 1000 }), TimeoutError)
})

test('large output in UTF-8', async () => {
  const result = await sandbox.commands.run(`python3 -c "print('ž🐎' * 50000, end='')"`)
  assert.equal(result.stdout, 'ž🐎'.repeat(50_000))
})

test('background, stdin, list, connect, kill', async () => {
  const cat = await sandbox.commands.run('cat', { background: true, stdin: true })
  await sandbox.commands.sendStdin(cat.pid, 'line ž\n')
  await sandbox.commands.closeStdin(cat.pid)
  assert.equal((await cat.wait()).stdout, 'line ž\n')

  const sleep = await sandbox.commands.run('exec sleep 1000', { background: true, timeoutMs: 0 })
  assert.ok((await sandbox.commands.list()).some((process) => process.pid === sleep.pid))
  await sleep.disconnect()
  const again = await sandbox.commands.connect(sleep.pid)
  assert.equal(await sandbox.commands.kill(sleep.pid), true)
  await assert.rejects(again.wait(), (error) => error instanceof CommandExitError && error.error === 'signal: killed')
  assert.equal(await sandbox.commands.kill(sleep.pid), false)
})

test('pty', async () => {
  let shown = ''
  const decoder = new TextDecoder()
  const pty = await sandbox.pty.create({ cols: 80, rows: 24, onData: (data) => (shown += decoder.decode(data)) })
  await sandbox.pty.resize(pty.pid, { cols: 101, rows: 30 })
  await sandbox.pty.sendInput(pty.pid, new TextEncoder().encode('stty size; exit\n'))
  assert.equal((await pty.wait()).exitCode, 0)
  assert.match(shown, /30 101\r\n/)
})

test('files', async () => {
  const written = await sandbox.files.write('js/a.txt', 'text ž')
  assert.deepEqual([written.name, written.type, written.path, written.metadata], ['a.txt', 'file', '/home/user/js/a.txt', undefined])
  assert.equal(await sandbox.files.read('js/a.txt'), 'text ž')
  assert.deepEqual(await sandbox.files.read('js/a.txt', { format: 'bytes' }), new TextEncoder().encode('text ž'))
  const many = await sandbox.files.write([
    { path: 'js/b', data: new Uint8Array(1_000_000).buffer },
    { path: '/tmp/js/c', data: new Blob(['blob']) },
  ])
  assert.deepEqual(many.map((file) => file.path), ['/home/user/js/b', '/tmp/js/c'])
  assert.equal((await sandbox.files.read('js/b', { format: 'bytes' })).length, 1_000_000)
  const stream = await sandbox.files.read('js/b', { format: 'stream' })
  let size = 0
  for await (const piece of stream) size += piece.length
  assert.equal(size, 1_000_000)
  const tagged = await sandbox.files.write('js/t', 'x', { metadata: { author: 'js' }, gzip: true, useOctetStream: true })
  assert.deepEqual(tagged.metadata, { author: 'js' })
  assert.deepEqual((await sandbox.files.list('js')).map((entry) => entry.name), ['a.txt', 'b', 't'])
  assert.equal((await sandbox.files.rename('js/b', 'js/d')).name, 'd')
  assert.equal(await sandbox.files.exists('js/b'), false)
  assert.equal((await sandbox.files.getInfo('js/d')).size, 1_000_000)
  assert.equal(await sandbox.files.makeDir('js/dir'), true)
  assert.equal(await sandbox.files.makeDir('js/dir'), false)
  await sandbox.files.remove('js')
  await assert.rejects(sandbox.files.read('js/a.txt'), FileNotFoundError)
})

test('watch', async () => {
  await sandbox.files.makeDir('watched')
  const events = []
  let enough
  const three = new Promise((resolve) => (enough = resolve))
  const handle = await sandbox.files.watchDir('watched', (event) => {
    if (events.push(event) === 3) enough()
  })
  await sandbox.files.write('watched/f', 'x')
  await three
  const { CREATE, CHMOD, WRITE } = FilesystemEventType
  assert.deepEqual(events.map((event) => [event.name, event.type]), [CREATE, CHMOD, WRITE].map((type) => ['f', type]))
  await handle.stop()
})

test('signed urls', async () => {
  await sandbox.files.write('signed', 'by url')
  const url = await sandbox.downloadUrl('signed', { useSignatureExpiration: 60_000 })
  assert.equal(await (await fetch(url)).text(), 'by url')
  const form = new FormData()
  form.append('file', new Blob(['posted']), 'any')
  const posted = await fetch(await sandbox.uploadUrl('posted'), { method: 'POST', body: form })
  assert.equal(posted.status, 200)
  assert.equal(await sandbox.files.read('posted'), 'posted')
})

test('list, info, timeout, connect', async () => {
  const info = await sandbox.getInfo()
  assert.deepEqual([info.sandboxId, info.name, info.metadata], [sandbox.sandboxId, 'base', { 'k a': 'v/1' }])
  const pages = Sandbox.list({ query: { metadata: { 'k a': 'v/1' }, state: ['running'] }, limit: 1 })
  assert.deepEqual((await pages.nextItems()).map((item) => item.sandboxId), [sandbox.sandboxId])
  assert.equal(pages.hasNext, false)
  await sandbox.setTimeout(60_000)
  assert.ok((await sandbox.getInfo()).endAt - new Date() <= 60_000)
  const again = await Sandbox.connect(sandbox.sandboxId)
  assert.equal((await again.commands.run('echo connected')).stdout, 'connected\n')
})

test('a killed sandbox', async () => {
  const other = await Sandbox.create('base')
  const running = await other.commands.run('sleep 100', { background: true })
  const ended = assert.rejects(running.wait(), /killed or reached its end of life/)
  assert.equal(await other.kill(), true)
  await ended
  assert.equal(await other.isRunning(), false)
  await assert.rejects(Sandbox.connect(other.sandboxId), NotFoundError)
  assert.equal(await Sandbox.kill(other.sandboxId), false)
})
