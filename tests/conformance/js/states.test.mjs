// Pausing, forks and snapshots through the official JavaScript SDK, against a real server.

import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'

import { NotFoundError, Sandbox } from 'e2b'

let sandbox

before(async () => {
  sandbox = await Sandbox.create('base', { timeoutMs: 300_000 })
})

after(async () => {
  await sandbox?.kill()
})

const bootId = async (of) => (await of.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout

test('pause and connect', async () => {
  const booted = await bootId(sandbox)
  const sleep = await sandbox.commands.run('exec sleep 1000', { background: true, timeoutMs: 0 })
  const cut = assert.rejects(sleep.wait())
  await sandbox.files.write('kept', 'on disk')
  assert.equal(await sandbox.pause(), true)
  await cut
  assert.equal(await sandbox.pause(), false)
  assert.equal((await sandbox.getInfo()).state, 'paused')
  assert.equal(await sandbox.isRunning(), false)
  const again = await Sandbox.connect(sandbox.sandboxId)
  assert.equal(await bootId(again), booted)
  assert.ok((await again.commands.list()).some((process) => process.pid === sleep.pid))
  assert.equal(await again.files.read('kept'), 'on disk')
})

test('pause without memory', async () => {
  const booted = await bootId(sandbox)
  assert.equal(await sandbox.pause({ keepMemory: false }), true)
  await sandbox.connect()
  assert.notEqual(await bootId(sandbox), booted)
  assert.equal(await sandbox.files.read('kept'), 'on disk')
})

test('a command wakes a sandbox that is to be woken', async () => {
  const waking = await Sandbox.create('base', { lifecycle: { onTimeout: 'pause', autoResume: true } })
  await waking.pause()
  assert.equal((await waking.commands.run('echo awake')).stdout, 'awake\n')
  assert.deepEqual((await waking.getInfo()).lifecycle, { onTimeout: 'pause', autoResume: true })
  await waking.kill()
})

test('fork', async () => {
  await sandbox.files.write('shared', 'of the source')
  const children = await sandbox.fork({ count: 2, timeoutMs: 60_000 })
  for (const [number, child] of children.entries()) {
    assert.ok(child instanceof Sandbox, String(child))
    assert.equal(await child.files.read('shared'), 'of the source')
    await child.files.write('own', String(number))
  }
  for (const [number, child] of children.entries()) {
    assert.equal(await child.files.read('own'), String(number))
    await child.kill()
  }
  assert.equal(await sandbox.files.exists('own'), false)
})

test('snapshots', async () => {
  const name = `js-${Date.now()}`
  await sandbox.files.write('when', 'first')
  const snapshot = await sandbox.createSnapshot({ name })
  assert.deepEqual([snapshot.snapshotId, snapshot.names], [`${name}:default`, [`${name}:default`]])
  await sandbox.files.write('when', 'second')
  const listed = await Sandbox.listSnapshots({ sandboxId: sandbox.sandboxId }).nextItems()
  assert.deepEqual(listed.map((item) => item.snapshotId), [snapshot.snapshotId])
  const made = await Sandbox.create(snapshot.snapshotId)
  assert.equal(await made.files.read('when'), 'first')
  await made.kill()
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)
  await assert.rejects(Sandbox.create(snapshot.snapshotId), /not found/)
  await assert.rejects(Sandbox.connect('i' + '0'.repeat(20)), NotFoundError)
})
