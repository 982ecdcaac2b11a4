//! What is left after `kill -9`, after a torn log, and on a full disk.

#![allow(clippy::expect_used)]

mod common;

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use common::{open_rw, pattern, Mode, Rig};
use overlaybd::{CompactOptions, FlushError, OpenUpperError, Upper};

const SIZE: u64 = 64 * 4096;
const BLOCK: usize = 4096;
/// How often a writer is killed, per mode.
const KILLS: u64 = 12;

/// What operation `n` of a run does.
#[derive(Debug, Clone, Copy)]
enum Step {
    Write { block: usize },
    Zero { block: usize },
    Flush,
    Seal { sync: bool },
    Compact,
}

fn step(seed: u64, n: u64) -> Step {
    let random = u64::from_le_bytes(pattern(seed * 1_000_003 + n + 1, 8).try_into().expect("8 bytes")) >> 7;
    let block = (random >> 16) as usize % (SIZE as usize / BLOCK);
    match random % 100 {
        0..60 => Step::Write { block },
        60..70 => Step::Zero { block },
        70..90 => Step::Flush,
        90..97 => Step::Seal { sync: random & 1024 == 0 },
        _ => Step::Compact,
    }
}

fn content(seed: u64, n: u64) -> Vec<u8> {
    pattern(seed ^ (n << 20) ^ 0xABCD, BLOCK)
}

/// The writer that gets killed: carries out steps for ever and says when each flush has returned.
#[test]
#[ignore = "run by killed_writers_lose_nothing"]
fn writer() {
    let dir = std::env::var("CRASH_DIR").expect("directory");
    let seed: u64 = std::env::var("CRASH_SEED").expect("seed").parse().expect("number");
    let mode = if std::env::var("CRASH_SPARSE").is_ok() { Mode::Sparse } else { Mode::Append };
    let mut rig = Rig::create(Path::new(&dir), mode, SIZE);
    let mut out = std::io::stdout();
    for n in 0.. {
        match step(seed, n) {
            Step::Write { block } => rig.image.write_at(&content(seed, n), (block * BLOCK) as u64).expect("write"),
            Step::Zero { block } => rig.image.zero_at((block * BLOCK) as u64, BLOCK as u64).expect("zero"),
            Step::Flush => {
                rig.image.flush().expect("flush");
                writeln!(out, "flushed {n}").expect("parent");
                out.flush().expect("parent");
            }
            Step::Seal { sync } if rig.names.len() < 200 => rig.seal_and_continue(sync),
            Step::Compact if rig.names.len() > 3 => {
                let to = rig.names.len() - 1;
                rig.compact(0, to, &CompactOptions { is_base: true, ..CompactOptions::default() });
            }
            _ => {}
        }
    }
}

fn kill_and_check(mode: Mode, seed: u64) {
    let dir = tempfile::tempdir().expect("directory");
    let mut command = Command::new(std::env::current_exe().expect("self"));
    command.args(["--exact", "writer", "--ignored", "--nocapture"]);
    command.env("CRASH_DIR", dir.path()).env("CRASH_SEED", seed.to_string());
    if mode == Mode::Sparse {
        command.env("CRASH_SPARSE", "1");
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("writer");
    let mut lines = BufReader::new(child.stdout.take().expect("pipe")).lines();
    // The moment is random: after some flush, while the writer is at whatever comes next.
    let flushes = 1 + (seed * 7) % 40;
    let mut flushed = None;
    while let Some(line) = lines.next().transpose().expect("pipe") {
        if let Some((_, n)) = line.rsplit_once("flushed ") {
            flushed = Some(n.parse::<u64>().expect("number"));
            if flushed_count(seed, flushed) >= flushes {
                break;
            }
        }
    }
    child.kill().expect("kill");
    child.wait().expect("wait");
    for line in lines.map_while(Result::ok) {
        if let Some(n) = line.strip_prefix("flushed ").and_then(|n| n.parse().ok()) {
            flushed = Some(n);
        }
    }
    let flushed = flushed.expect("the writer got to flush");

    // Every block holds what it held at the last flush that returned, or what was written to it later.
    let blocks = SIZE as usize / BLOCK;
    let mut allowed: Vec<HashSet<Vec<u8>>> = vec![HashSet::from([vec![0; BLOCK]]); blocks];
    for n in 0..flushed + 3000 {
        let (block, bytes) = match step(seed, n) {
            Step::Write { block } => (block, content(seed, n)),
            Step::Zero { block } => (block, vec![0; BLOCK]),
            _ => continue,
        };
        if n < flushed {
            allowed[block].clear();
        }
        allowed[block].insert(bytes);
    }
    let rig = Rig::reopen(dir.path(), mode, SIZE);
    let bytes = rig.read_all();
    for (block, bytes) in bytes.chunks(BLOCK).enumerate() {
        assert!(allowed[block].contains(bytes), "{mode:?}, seed {seed}: block {block} is wrong after flush {flushed}");
    }
    // And it goes on from there.
    rig.image.write_at(&content(seed, u64::MAX >> 21), 0).expect("write");
    rig.image.flush().expect("flush");
    drop(rig);
    let again = Rig::reopen(dir.path(), mode, SIZE).read_all();
    assert!(again[BLOCK..] == bytes[BLOCK..] && again[..BLOCK] == content(seed, u64::MAX >> 21));
}

fn flushed_count(seed: u64, up_to: Option<u64>) -> u64 {
    (0..=up_to.unwrap_or(0)).filter(|n| matches!(step(seed, *n), Step::Flush)).count() as u64
}

#[test]
fn killed_writers_lose_nothing() {
    (1..=KILLS).for_each(|seed| kill_and_check(Mode::Append, seed));
}

#[test]
fn killed_sparse_writers_lose_nothing() {
    (1..=KILLS).for_each(|seed| kill_and_check(Mode::Sparse, seed));
}

/// An upper with 10 flushed blocks, and its index log's bytes.
fn flushed_upper(dir: &Path) -> Vec<u8> {
    let rig = Rig::create(dir, Mode::Append, SIZE);
    for n in 0..10 {
        // Two sectors apart, so that entries do not join.
        rig.image.write_at(&content(1, n)[..512], n * 1024).expect("write");
    }
    rig.image.flush().expect("flush");
    std::fs::read(dir.join("0.index")).expect("log")
}

fn check_flushed(dir: &Path, count: u64) {
    let rig = Rig::reopen(dir, Mode::Append, SIZE);
    let bytes = rig.read_all();
    for n in 0..10 {
        let got = &bytes[n as usize * 1024..][..512];
        let expected = if n < count { content(1, n)[..512].to_vec() } else { vec![0; 512] };
        assert!(got == expected, "write {n}");
    }
}

#[test]
fn a_torn_log_tail_is_dropped() {
    let dir = tempfile::tempdir().expect("directory");
    let log = flushed_upper(dir.path());
    assert_eq!(log.len(), 4096 + 10 * 16);
    let path = dir.path().join("0.index");
    let entry = |bytes: u128| bytes.to_le_bytes().to_vec();
    let beyond_the_data = entry(3 | 1 << 50 | 1000 << 64);
    let no_length = entry(3 | 9 << 64);
    for tail in [vec![], vec![7; 5], vec![0; 16], vec![0; 8192], beyond_the_data.clone(), no_length, vec![0x55; 40]] {
        std::fs::write(&path, [log.clone(), tail.clone()].concat()).expect("log");
        check_flushed(dir.path(), 10);
        assert!(std::fs::read(&path).expect("log") == log, "{tail:?} was not cut off");
    }
    std::fs::write(&path, &log[..log.len() - 3 * 16 - 7]).expect("log");
    check_flushed(dir.path(), 6);
}

#[test]
fn a_page_that_never_reached_the_disk_is_no_damage_but_damage_is() {
    let dir = tempfile::tempdir().expect("directory");
    let log = flushed_upper(dir.path());
    let path = dir.path().join("0.index");
    let last = log[log.len() - 16..].to_vec();
    std::fs::write(&path, [log.clone(), vec![0; 32], last].concat()).expect("log");
    check_flushed(dir.path(), 10);
    // The zeroes are padding now, which overlaybd skips too.
    let padding = ((1u128 << 50) - 1).to_le_bytes();
    assert_eq!(std::fs::read(&path).expect("log")[log.len()..][..32], [padding, padding].concat());

    let mut damaged = log;
    damaged[4096 + 3 * 16 + 12] = 0x7F;
    std::fs::write(&path, damaged).expect("log");
    let opened = Upper::open(open_rw(&dir.path().join("0.data")), Some(open_rw(&path)));
    assert!(matches!(opened, Err(OpenUpperError::Log(_))), "flushed writes are not dropped silently");
}

#[test]
fn a_guest_that_never_flushes_is_flushed_now_and_then() {
    let dir = tempfile::tempdir().expect("directory");
    let size = 512 << 20;
    let rig = Rig::create(dir.path(), Mode::Append, size);
    // Every second sector, so that no entries join: more than may wait for a flush.
    for n in 0..(1 << 18) + 10u64 {
        rig.image.write_at(&[n as u8 | 1; 512], n * 1024).expect("write");
    }
    drop(rig);
    let rig = Rig::reopen(dir.path(), Mode::Append, size);
    let mut sector = [0; 512];
    rig.image.read_at(&mut sector, ((1 << 18) - 1) * 1024).expect("read");
    assert_eq!(sector, [0xFF; 512]);
}

/// The limit on file sizes stands in for a full disk; the shell makes hitting it an error instead of a signal.
#[test]
fn a_full_disk_is_an_error_and_nothing_else() {
    let script = "trap '' XFSZ; ulimit -f 1024; exec \"$0\" --exact \"$1\" --ignored --nocapture";
    for test in ["full_disk", "full_log"] {
        let test_binary = std::env::current_exe().expect("self");
        let status = Command::new("bash").args(["-c", script]).arg(test_binary).arg(test).status();
        assert!(status.expect("bash").success(), "{test}");
    }
}

#[test]
#[ignore = "run by a_full_disk_is_an_error_and_nothing_else with a limit of 1 MiB per file"]
fn full_disk() {
    let dir = tempfile::tempdir().expect("directory");
    let size = 4 << 20;
    let rig = Rig::create(dir.path(), Mode::Append, size);
    let mut model = vec![0u8; size as usize];
    let mut failures = 0;
    for n in 0..600u64 {
        let (offset, bytes) = ((n * 7919 % 1000) * 4096, content(3, n));
        match rig.image.write_at(&bytes, offset) {
            Ok(()) => model[offset as usize..][..BLOCK].copy_from_slice(&bytes),
            Err(error) => {
                // EFBIG, the limit's counterpart of ENOSPC.
                assert_eq!(error.raw_os_error(), Some(27), "{error}");
                failures += 1;
            }
        }
        if n % 50 == 0 {
            rig.image.flush().expect("the log still fits");
        }
    }
    assert!(failures > 300, "the limit was hit: {failures}");
    // Zeroes need an entry in the log only, which must not be held up.
    rig.image.zero_at(0, 8192).expect("zero");
    model[..8192].fill(0);
    assert!(rig.read_all() == model);
    assert!(rig.image.seal().is_err(), "no room for the index");
    assert!(rig.read_all() == model);
    rig.image.flush().expect("flush");
    drop(rig);
    let rig = Rig::reopen(dir.path(), Mode::Append, size);
    assert!(rig.read_all() == model);
}

#[test]
#[ignore = "run by a_full_disk_is_an_error_and_nothing_else with a limit of 1 MiB per file"]
fn full_log() {
    let dir = tempfile::tempdir().expect("directory");
    drop(Rig::create(dir.path(), Mode::Append, SIZE));
    // Padding fills the log but for five entries.
    let path = dir.path().join("0.index");
    let mut log = std::fs::read(&path).expect("log");
    while log.len() < (1 << 20) - 5 * 16 {
        log.extend_from_slice(&((1u128 << 50) - 1).to_le_bytes());
    }
    std::fs::write(&path, log).expect("log");
    let rig = Rig::reopen(dir.path(), Mode::Append, SIZE);
    for n in 0..3 {
        rig.image.write_at(&content(1, n)[..512], n * 1024).expect("write");
    }
    rig.image.flush().expect("three fit");
    for n in 3..10 {
        rig.image.write_at(&content(1, n)[..512], n * 1024).expect("write");
    }
    for _ in 0..2 {
        assert!(matches!(rig.image.flush(), Err(FlushError::Index(_))), "ten do not");
        let bytes = rig.read_all();
        (0..10).for_each(|n| assert!(bytes[n * 1024..][..512] == content(1, n as u64)[..512]));
    }
    drop(rig);
    check_flushed(dir.path(), 3);
}
