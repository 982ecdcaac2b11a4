//! What the format costs, as ratios to plain file reads and writes in the same run.
//!
//! The files stay in the page cache and the times are CPU time of the one thread, kernel included: that is what the format adds
//! to, and it holds on a machine that is busy with other things.
//!
//! `cargo bench -p overlaybd --target <target>`; with `OVERLAYBD_BENCH_DIR` naming where the files go.

#![allow(missing_docs, clippy::expect_used)]

use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use overlaybd::zfile::{Algorithm, ZFile, ZFileOptions, ZFileWriter};
use overlaybd::{
    ByteSource, DigestWriter, FileSource, Image, Layer, LayerInfo, LayerWriter, ParentCheck, Stack, Upper, Uuid,
};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 256 * MIB;
const EXTENTS: u64 = 100_000;

/// CPU time this thread has used.
fn now() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Median of `runs` timings.
fn median(runs: usize, mut run: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..runs)
        .map(|_| {
            let start = now();
            run();
            now() - start
        })
        .collect();
    times.sort_unstable();
    times[runs / 2]
}

/// A fixed permutation of `0..n`, for `n` a power of two.
fn shuffled(n: u64) -> impl Iterator<Item = u64> {
    (0..n).map(move |i| (i * 0x9E37_79B1 + 12_345) % n)
}

fn info(uuid: u8, parent: u8, virtual_size: u64) -> LayerInfo {
    let (uuid, parent) = (Uuid::from_bytes([uuid; 16]), Uuid::from_bytes([parent; 16]));
    LayerInfo { virtual_size, uuid, parent, user_tag: vec![] }
}

fn rw(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).expect("file")
}

fn fill(seed: u64, buf: &mut [u8]) {
    let mut state = seed | 1;
    for word in buf.chunks_exact_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(seed);
        // Half zeroes, as disks are: compressible, but not absurdly so.
        word.copy_from_slice(&(state >> 32).to_le_bytes());
    }
}

/// Layers that each hold every `count`-th 64 KiB of the image.
fn layers(dir: &Path, count: u64) -> Vec<Arc<Layer>> {
    let mut buf = vec![0; 64 << 10];
    (0..count)
        .map(|i| {
            let path = dir.join(format!("stack{count}-{i}"));
            let out = std::io::BufWriter::with_capacity(MIB as usize, rw(&path));
            let mut writer = LayerWriter::new(out, info(i as u8 + 1, i as u8, SIZE)).expect("header");
            for chunk in (i..SIZE / buf.len() as u64).step_by(count as usize) {
                fill(chunk, &mut buf);
                writer.data(chunk * buf.len() as u64, &buf).expect("data");
            }
            writer.finish().expect("finish");
            open(&path)
        })
        .collect()
}

fn source(path: &Path) -> Arc<dyn ByteSource> {
    Arc::new(FileSource::new(File::open(path).expect("file")).expect("metadata"))
}

fn open(path: &Path) -> Arc<Layer> {
    Arc::new(Layer::open(source(path)).expect("layer"))
}

fn read_all(step: u64, random: bool, mut read: impl FnMut(&mut [u8], u64)) -> Duration {
    let mut buf = vec![0; step as usize];
    median(5, || {
        let count = SIZE / step;
        if random {
            shuffled(count).take(20_000).for_each(|i| read(&mut buf, i * step));
        } else {
            (0..count).for_each(|i| read(&mut buf, i * step));
        }
    })
}

fn report(what: &str, time: Duration, raw: Duration) {
    println!(
        "{what:<52} {:>9.2} ms  {:>5.2}x of raw",
        time.as_secs_f64() * 1e3,
        raw.as_secs_f64() / time.as_secs_f64()
    );
}

fn reads(dir: &Path) {
    let raw_path = dir.join("raw");
    let raw = rw(&raw_path);
    let mut buf = vec![0; MIB as usize];
    for i in 0..SIZE / MIB {
        fill(i, &mut buf);
        raw.write_all_at(&buf, i * MIB).expect("raw");
    }
    for (name, step, random) in [("sequential 128 KiB", 128 << 10, false), ("random 4 KiB", 4096, true)] {
        let raw_time = read_all(step, random, |buf, at| raw.read_exact_at(buf, at).expect("raw"));
        report(&format!("read {name}, raw file"), raw_time, raw_time);
        for count in [1, 4, 32] {
            let stack = Stack::open(layers(dir, count), ParentCheck::Enforce).expect("stack");
            let image = Image::read_only(Arc::new(stack));
            let time = read_all(step, random, |buf, at| {
                image.read_at(buf, at).expect("read");
            });
            report(&format!("read {name}, {count} layers"), time, raw_time);
        }
        for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
            let path = dir.join("zfile");
            let _ = std::fs::remove_file(&path);
            let options = ZFileOptions { algorithm, block_size: 4096, verify: true };
            let mut writer =
                ZFileWriter::new(std::io::BufWriter::with_capacity(MIB as usize, rw(&path)), options).expect("header");
            std::io::copy(&mut File::open(&raw_path).expect("raw"), &mut writer).expect("copy");
            writer.finish().expect("finish");
            let zfile = ZFile::open(source(&path)).expect("zfile");
            let time = read_all(step, random, |buf, at| zfile.read_exact_at(buf, at).expect("read"));
            report(&format!("read {name}, {algorithm:?} in blocks of 4 KiB"), time, raw_time);
        }
    }
}

/// First writes to a fresh file, then the same again over what was written.
fn writes(dir: &Path) {
    for (name, step, random) in [("sequential 128 KiB", 128 << 10, false), ("random 4 KiB", 4096u64, true)] {
        let mut buf = vec![0; step as usize];
        fill(7, &mut buf);
        let order: Vec<u64> = if random { shuffled(SIZE / step).collect() } else { (0..SIZE / step).collect() };
        let twice = |write: &dyn Fn(&[u8], u64)| {
            [(); 2].map(|()| median(1, || order.iter().for_each(|i| write(&buf, i * step))))
        };
        let mut times: [Vec<[Duration; 2]>; 3] = Default::default();
        for _ in 0..5 {
            // One after the other, each with the page cache to itself.
            let fresh = |name: &str| {
                let _ = std::fs::remove_file(dir.join(name));
                rw(&dir.join(name))
            };
            let image = |upper| Image::writable(Arc::new(Stack::empty()), Arc::new(upper)).expect("image");
            let raw = fresh("w.data");
            raw.set_len(SIZE).expect("raw");
            times[0].push(twice(&|buf, at| raw.write_all_at(buf, at).expect("raw")));
            let append = image(Upper::create(fresh("w.data"), fresh("w.index"), info(1, 0, SIZE)).expect("upper"));
            times[1].push(twice(&|buf, at| append.write_at(buf, at).expect("write")));
            let sparse = image(Upper::create_sparse(fresh("w.data"), info(1, 0, SIZE)).expect("upper"));
            times[2].push(twice(&|buf, at| sparse.write_at(buf, at).expect("write")));
        }
        for (pass, what) in ["first", "again"].into_iter().enumerate() {
            let middle = |times: &[[Duration; 2]]| {
                let mut times: Vec<Duration> = times.iter().map(|both| both[pass]).collect();
                times.sort_unstable();
                times[times.len() / 2]
            };
            for (mode, mine) in ["raw file", "append-only", "sparse"].into_iter().zip(&times) {
                report(&format!("write {name}, {what}, {mode}"), middle(mine), middle(&times[0]));
            }
        }
    }
}

/// Writes `EXTENTS` blocks of 4 KiB that do not touch, in random order.
fn scatter(image: &Image) {
    for i in shuffled(1 << 17).filter(|i| *i < EXTENTS) {
        image.write_at(&[i as u8; 4096], i * 8192).expect("write");
    }
    image.flush().expect("flush");
}

fn metadata(dir: &Path) {
    let size = (1 << 17) * 8192;
    let path = |name: &str, i: usize| -> PathBuf { dir.join(format!("m{i}.{name}")) };
    let mut i = 0;
    let create = |i: usize, uuid: u8, parent: u8| {
        Arc::new(Upper::create(rw(&path("data", i)), rw(&path("index", i)), info(uuid, parent, size)).expect("upper"))
    };
    let mut seals = Vec::new();
    let mut opens = Vec::new();
    let mut attaches = Vec::new();
    for _ in 0..5 {
        let image = Image::writable(Arc::new(Stack::empty()), create(i, 1, 0)).expect("image");
        scatter(&image);
        drop(image);
        let start = now();
        let upper = Upper::open(rw(&path("data", i)), Some(rw(&path("index", i)))).expect("upper");
        let image = Image::writable(Arc::new(Stack::empty()), Arc::new(upper)).expect("image");
        attaches.push(now() - start);
        assert_eq!(image.upper().expect("upper").stats().extents as u64, EXTENTS);
        let start = now();
        let layer = image.seal_and_continue(create(i + 1, 2, 1)).expect("seal");
        seals.push(now() - start);
        layer.sync().expect("sync");
        let start = now();
        let stack = Stack::open(vec![open(&path("data", i))], ParentCheck::Enforce).expect("stack");
        opens.push(now() - start);
        assert_eq!(stack.extents() as u64, EXTENTS);
        i += 2;
    }
    for (what, times) in
        [("open an upper", &mut attaches), ("seal and continue", &mut seals), ("open a layer", &mut opens)]
    {
        times.sort_unstable();
        println!("{:<52} {:>9.2} ms", format!("{what}, {EXTENTS} extents, random order"), times[2].as_secs_f64() * 1e3);
    }
    let layer = open(&path("data", 0));
    let time = median(5, || {
        black_box(Stack::open(vec![layer.clone(); 32], ParentCheck::Ignore).expect("stack"));
    });
    println!("{:<52} {:>9.2} ms", format!("merge 32 layers of {EXTENTS} extents"), time.as_secs_f64() * 1e3);
    let stack = Stack::open(vec![layer], ParentCheck::Enforce).expect("stack");
    let mut segments = Vec::new();
    let time = median(5, || {
        for i in shuffled(1 << 17) {
            segments.clear();
            stack.resolve(i * 16, i * 16 + 8, &mut segments);
            black_box(&segments);
        }
    });
    println!(
        "{:<52} {:>9.0} ns",
        format!("look up among {EXTENTS} extents"),
        time.as_nanos() as f64 / f64::from(1 << 17)
    );
}

fn digest(dir: &Path) {
    let time = median(3, || {
        let mut raw = File::open(dir.join("raw")).expect("raw");
        std::io::copy(&mut raw, &mut DigestWriter::new(std::io::sink())).expect("copy");
    });
    println!("{:<52} {:>9.0} MiB/s", "SHA-256 while writing", SIZE as f64 / MIB as f64 / time.as_secs_f64());
}

fn main() {
    let dir = match std::env::var_os("OVERLAYBD_BENCH_DIR") {
        Some(dir) => tempfile::tempdir_in(dir),
        None => tempfile::tempdir(),
    }
    .expect("directory");
    metadata(dir.path());
    reads(dir.path());
    writes(dir.path());
    digest(dir.path());
}
