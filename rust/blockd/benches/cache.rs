//! What a read through the cache costs: hits by size, cold reads, bulk prefetch. Prints one line per case.
//!
//! `cargo bench -p blockd --bench cache`

#![allow(clippy::expect_used)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockd::cache::{Cache, CacheOptions, LayerSource, RemoteLayer, BLOCK};
use cache_common::{content, settle, Server};
use overlaybd::{ByteSource, FileSource};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

#[path = "../tests/cache_common/mod.rs"]
mod cache_common;

const SIZE: usize = 64 << 20;

fn open(dir: &std::path::Path, server: &Server) -> (Cache, LayerSource) {
    let cache = Cache::open(CacheOptions::new(dir, 256 << 20)).expect("cache");
    let layer = cache.open_layer(RemoteLayer::new(server.url("/layer"), SIZE as u64)).expect("layer");
    (cache, layer)
}

/// CPU time of this thread so far, kernel included: it holds on a machine that is busy with other things.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("schedstat");
    Duration::from_nanos(stat.split(' ').next().and_then(|ns| ns.parse().ok()).expect("nanoseconds"))
}

/// Mean wall and CPU time of random reads of `len` bytes, `align`-aligned.
fn random(source: &dyn ByteSource, len: usize, align: usize, rounds: u32) -> (Duration, Duration) {
    let mut buf = vec![0; len];
    let mut state = 12345_u64;
    let (started, before) = (Instant::now(), cpu());
    for _ in 0..rounds {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let offset = (state >> 20) % (SIZE - len) as u64;
        source.read_exact_at(black_box(&mut buf), offset - offset % align as u64).expect("read");
    }
    (started.elapsed() / rounds, (cpu() - before) / rounds)
}

/// Reads a layer of an origin behind TLS: wall time, and CPU time of the whole process.
fn over_tls(whole: &mut [u8]) -> (Duration, Duration) {
    let pem = |name| std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls").join(name);
    let certificate = CertificateDer::from_pem_file(pem("certificate.pem")).expect("certificate");
    let key = PrivateKeyDer::from_pem_file(pem("key.pem")).expect("key");
    let config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .expect("a pair");
    let server = Server::tls(content(SIZE), Arc::new(config));
    // There are no other threads that could look at the environment.
    std::env::set_var("SSL_CERT_FILE", pem("certificate.pem"));
    let dir = tempfile::tempdir().expect("directory");
    let cache = Cache::open(CacheOptions::new(dir.path(), 256 << 20)).expect("cache");
    let url = format!("https://127.0.0.1:{}/layer", server.port);
    let layer = cache.open_layer(RemoteLayer::new(url, SIZE as u64)).expect("layer");
    let spent = || {
        let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Duration::new(used.tv_sec as u64, used.tv_nsec as u32)
    };
    let (started, before) = (Instant::now(), spent());
    layer.read_exact_at(whole, 0).expect("read");
    (started.elapsed(), spent() - before)
}

fn main() {
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let mut whole = vec![0; SIZE];
    let (wall, spent) = over_tls(&mut whole);
    println!(
        "cold, 64 MiB over TLS                    {:8.0} MiB/s   CPU of both ends {spent:.2?}",
        64.0 / wall.as_secs_f64()
    );
    let server = Server::new(content(SIZE));
    let dir = tempfile::tempdir().expect("directory");
    let (cache, layer) = open(dir.path(), &server);
    let started = Instant::now();
    layer.read_exact_at(&mut whole, 0).expect("read");
    let rate = SIZE as f64 / started.elapsed().as_secs_f64() / f64::from(1 << 20);
    println!("cold, one sequential read of 64 MiB      {rate:8.0} MiB/s");
    settle(&cache);

    let plain = dir.path().join("plain");
    std::fs::write(&plain, &server.shared.content).expect("file");
    let plain = FileSource::new(std::fs::File::open(&plain).expect("file")).expect("file");
    for (name, len, align) in [
        ("512 B, any offset", 512, 1),
        ("4 KiB", 4096, 4096),
        ("4 KiB, any offset", 4096, 512),
        ("128 KiB", 128 << 10, 4096),
    ] {
        let (_, hit) = random(&layer, len, align, 20_000);
        let (_, file) = random(&plain, len, align, 20_000);
        println!("hit, {name:20} CPU {hit:10.2?}   the same from a plain file {file:10.2?}");
    }
    drop((layer, cache));
    let started = Instant::now();
    let cache = Cache::open(CacheOptions::new(dir.path(), 256 << 20)).expect("cache");
    let start = started.elapsed();
    let started = Instant::now();
    let layer = cache.open_layer(RemoteLayer::new(server.url("/layer"), SIZE as u64)).expect("layer");
    println!("start-up {start:.2?}, first attach with probe {:.2?}", started.elapsed());
    drop((layer, cache));

    *server.shared.delay.lock().expect("delay") = Duration::from_millis(2);
    let fresh = tempfile::tempdir().expect("directory");
    let (_cache, layer) = open(fresh.path(), &server);
    let (cold, _) = random(&layer, 4096, 4096, 100);
    println!("cold, 4 KiB random, 2 ms to the origin   {cold:10.2?}, blocks of {} KiB", BLOCK / 1024);

    let fresh = tempfile::tempdir().expect("directory");
    let (cache, layer) = open(fresh.path(), &server);
    let started = Instant::now();
    std::thread::scope(|scope| {
        for part in 0..4u64 {
            let layer = &layer;
            let ranges = (part * SIZE as u64 / 4..(part + 1) * SIZE as u64 / 4).step_by(4 << 20);
            scope.spawn(move || ranges.for_each(|at| layer.prefetch(at, (4 << 20) - BLOCK).expect("fetched")));
        }
    });
    let fetched = cache.stats().fetched;
    let rate = (fetched * BLOCK) as f64 / started.elapsed().as_secs_f64() / f64::from(1 << 20);
    println!("prefetch of {fetched} blocks, 2 ms to the origin {rate:8.0} MiB/s");
}
