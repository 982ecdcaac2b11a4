//! Many readers, one cache: single flight, read-ahead, the bound, eviction, damage, restarts, working sets.

#![allow(clippy::unwrap_used)]

mod cache_common;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use blockd::cache::{Cache, LayerSource, OpenCacheError, RemoteLayer};
use cache_common::{content, disk_usage, open, patient as cache, read, settle, Act, Server, BLOCK_LEN};
use overlaybd::ByteSource;

const LIMIT: u64 = 64 << 20;

fn at(block: usize) -> u64 {
    (block * BLOCK_LEN) as u64
}

#[test]
fn one_fetch_however_many_ask() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(4 * BLOCK_LEN));
    let cache = cache(dir.path(), LIMIT);
    let layers = [open(&cache, &server), open(&cache, &server)];
    let probes = server.seen().len();
    server.hold(true);
    std::thread::scope(|scope| {
        for reader in 0..64 {
            let (layer, content) = (&layers[reader % 2], &server.shared.content);
            scope.spawn(move || {
                let from = 2 * BLOCK_LEN + reader * 4001;
                assert!(read(layer, from as u64, 5000).unwrap() == content[from..from + 5000]);
            });
        }
        server.wait_for(probes + 1);
        server.hold(false);
    });
    let ranges: Vec<_> = server.seen().iter().skip(probes).map(|seen| (seen.range.start, seen.range.end)).collect();
    assert_eq!(ranges, [(at(2), at(3))], "64 readers of two attached images, one request");
    settle(&cache);
    let stats = cache.stats();
    assert_eq!((stats.fetched, stats.misses), (1, 1));
    assert_eq!(stats.hits + stats.joined, 63);
}

#[test]
fn many_readers_have_few_requests_on_the_wire() {
    const BLOCKS: usize = 128;
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(BLOCKS * BLOCK_LEN));
    let cache = cache(dir.path(), LIMIT);
    let layer = open(&cache, &server);
    server.hold(true);
    std::thread::scope(|scope| {
        for reader in 0..1000 {
            let (layer, content) = (&layer, &server.shared.content);
            scope.spawn(move || {
                let from = (reader * 37 % BLOCKS) * BLOCK_LEN + reader;
                assert!(read(layer, from as u64, 100).unwrap() == content[from..from + 100]);
            });
        }
        server.wait_for(4);
        let on_wire = server.shared.connections.load(std::sync::atomic::Ordering::SeqCst);
        assert!(on_wire <= 12, "{on_wire} connections");
        server.hold(false);
    });
    assert_eq!(cache.stats().fetched, BLOCKS as u64);
}

#[test]
fn a_sequential_reader_finds_its_blocks_fetched_in_large_ranges() {
    const BLOCKS: usize = 64;
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(BLOCKS * BLOCK_LEN));
    let cache = cache(dir.path(), LIMIT);
    let layer = open(&cache, &server);
    for step in 0..BLOCKS * 2 {
        let from = step * BLOCK_LEN / 2;
        assert!(read(&layer, from as u64, BLOCK_LEN / 2).unwrap() == server.shared.content[from..from + BLOCK_LEN / 2]);
    }
    let requests = server.seen().len();
    assert!(requests <= BLOCKS / 3, "{requests} requests for {BLOCKS} blocks");
    assert_eq!(cache.stats().fetched, BLOCKS as u64, "each block once");
}

#[test]
fn a_wide_read_is_one_request() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(8 * BLOCK_LEN));
    let cache = cache(dir.path(), LIMIT);
    let layer = open(&cache, &server);
    let probes = server.seen().len();
    assert!(read(&layer, 100, 6 * BLOCK_LEN).unwrap() == server.shared.content[100..100 + 6 * BLOCK_LEN]);
    // What may follow is reading ahead, or going on after a stall.
    assert_eq!(server.seen()[probes].range, 0..7 * BLOCK_LEN as u64);
    assert!(read(&layer, 8 * BLOCK_LEN as u64 - 1, 2).is_err());
    assert!(read(&layer, u64::MAX, 2).is_err());
    assert!(read(&layer, 8 * BLOCK_LEN as u64, 0).is_ok());
}

#[test]
fn the_bound_holds_and_the_cold_goes_first() {
    const BLOCKS: usize = 64;
    let dir = tempfile::tempdir().unwrap();
    let servers = [Server::new(content(BLOCKS * BLOCK_LEN)), Server::new(content(BLOCKS * BLOCK_LEN))];
    let limit = 24 * BLOCK_LEN as u64;
    let cache = cache(dir.path(), limit);
    let layers = servers.each_ref().map(|server| open(&cache, server));
    let hot = 5;
    for step in 0..3 * BLOCKS {
        for (layer, server) in layers.iter().zip(&servers) {
            let from = (step * 29 % BLOCKS) * BLOCK_LEN;
            assert!(read(layer, from as u64, 4096).unwrap() == server.shared.content[from..from + 4096]);
        }
        read(&layers[0], at(hot), 4096).unwrap();
        settle(&cache);
        let stats = cache.stats();
        assert!(stats.used_bytes <= limit, "{stats:?}");
        assert!(disk_usage(dir.path()) <= limit, "{} on disk", disk_usage(dir.path()));
    }
    let stats = cache.stats();
    assert!(stats.evicted > BLOCKS as u64 && stats.blocks >= 20, "{stats:?}");
    assert_eq!(stats.damaged, 0, "{stats:?}");
    let fetches = servers[0].seen().iter().filter(|seen| seen.range.contains(&at(hot))).count();
    assert!(fetches <= 3, "the hot block was fetched {fetches} times");
    // A closed layer's blocks go like others, and its files with the last of them.
    let [first, second] = layers;
    drop(first);
    for block in 0..BLOCKS {
        read(&second, at(block), 1).unwrap();
    }
    settle(&cache);
    assert_eq!(cache.stats().layers, 1);
    assert!(disk_usage(dir.path()) <= limit);
}

#[test]
fn readers_in_parallel_with_evictions_and_rot_see_only_right_bytes() {
    const BLOCKS: usize = 40;
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(BLOCKS * BLOCK_LEN));
    let limit = 10 * BLOCK_LEN as u64;
    let cache = cache(dir.path(), limit);
    let layer = open(&cache, &server);
    let path = std::fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.path());
    let path = path.into_iter().find(|path| path.extension().is_some_and(|e| e == "data")).unwrap();
    let rot = OpenOptions::new().write(true).open(path).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8_usize {
            let (layer, content, rot) = (&layer, &server.shared.content, &rot);
            scope.spawn(move || {
                for step in 0..150_usize {
                    let from = (step * (3 + 2 * thread) % BLOCKS) * BLOCK_LEN + step * 997 % 200_000;
                    assert!(read(layer, from as u64, 9000).unwrap() == content[from..from + 9000]);
                    if step % 10 == thread {
                        rot.write_all_at(&[0xee; 64], from as u64).unwrap();
                    }
                }
            });
        }
    });
    settle(&cache);
    let stats = cache.stats();
    assert!(stats.used_bytes <= limit && stats.evicted > 0 && stats.damaged > 0, "{stats:?}");
}

#[test]
fn a_smaller_bound_at_the_next_start_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(32 * BLOCK_LEN));
    {
        let cache = cache(dir.path(), LIMIT);
        let layer = open(&cache, &server);
        read(&layer, 0, 32 * BLOCK_LEN).unwrap();
        settle(&cache);
        assert!(matches!(Cache::open(cache_common::options(dir.path(), LIMIT)), Err(OpenCacheError::Locked(_))));
    }
    let limit = 10 * BLOCK_LEN as u64;
    let cache = cache(dir.path(), limit);
    assert!(disk_usage(dir.path()) <= limit, "{}", disk_usage(dir.path()));
    let layer = open(&cache, &server);
    assert!(read(&layer, 0, 32 * BLOCK_LEN).unwrap() == server.shared.content);
}

#[test]
fn blocks_outlive_the_daemon_and_changed_objects_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(6 * BLOCK_LEN + 77));
    let size = server.shared.content.len();
    for round in 0..3 {
        let cache = cache(dir.path(), LIMIT);
        let before = server.seen().len();
        let layer = open(&cache, &server);
        assert!(read(&layer, 0, size).unwrap() == server.shared.content);
        settle(&cache);
        let asked = server.seen().len() - before;
        assert_eq!(asked, if round == 0 { 2 } else { 1 }, "after a restart only the probe is sent");
    }
    // Another version of the object is another layer.
    *server.shared.etag.lock().unwrap() = Some("\"next\"".to_owned());
    let cache = cache(dir.path(), LIMIT);
    let layer = open(&cache, &server);
    let before = server.seen().len();
    read(&layer, 0, 10).unwrap();
    assert_eq!(server.seen().len() - before, 1);
}

#[test]
fn an_object_without_validator_is_not_kept() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(3 * BLOCK_LEN));
    *server.shared.etag.lock().unwrap() = None;
    let cache = cache(dir.path(), LIMIT);
    let layer = open(&cache, &server);
    read(&layer, 0, 3 * BLOCK_LEN).unwrap();
    settle(&cache);
    assert_eq!(cache.stats().blocks, 3);
    drop(layer);
    assert_eq!((cache.stats().blocks, cache.stats().used_bytes), (0, 0));
    let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["lock"]);
}

#[test]
fn rot_is_found_and_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(4 * BLOCK_LEN));
    let cache = cache(dir.path(), LIMIT);
    let layer = open(&cache, &server);
    read(&layer, 0, 4 * BLOCK_LEN).unwrap();
    settle(&cache);
    for (suffix, offset) in [(".data", at(2) + 12_345), (".meta", 4096 + 256 + 7)] {
        let entry = std::fs::read_dir(dir.path()).unwrap().flatten();
        let path = entry.map(|e| e.path()).find(|path| path.to_str().unwrap().ends_with(suffix)).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 0x40], offset).unwrap();
    }
    assert!(read(&layer, 0, 4 * BLOCK_LEN).unwrap() == server.shared.content);
    settle(&cache);
    assert_eq!(cache.stats().damaged, 2);
    assert!(read(&layer, 0, 4 * BLOCK_LEN).unwrap() == server.shared.content);
    assert_eq!(cache.stats().damaged, 2, "what was fetched again is whole");
}

#[test]
fn the_directory_may_be_deleted_at_any_time() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("cache");
    let server = Server::new(content(4 * BLOCK_LEN));
    let cache = cache(&dir, LIMIT);
    let layer = open(&cache, &server);
    read(&layer, 0, BLOCK_LEN).unwrap();
    settle(&cache);
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(read(&layer, 0, 4 * BLOCK_LEN).unwrap() == server.shared.content);
    drop(layer);
    let other = Server::new(content(2 * BLOCK_LEN));
    let layer = open(&cache, &other);
    assert!(read(&layer, 0, 2 * BLOCK_LEN).unwrap() == other.shared.content);
    assert!(dir.is_dir());
}

#[test]
fn a_prefetch_fetches_what_is_missing_in_large_ranges() {
    const BLOCKS: usize = 48;
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(BLOCKS * BLOCK_LEN - 5));
    let cache = cache(dir.path(), LIMIT);
    let layer = open(&cache, &server);
    read(&layer, at(22), 10).unwrap();
    settle(&cache);
    let before = server.seen().len();
    layer.prefetch(at(20) + 1, at(20) - 2).unwrap();
    let asked = || server.seen()[before..].iter().map(|seen| seen.range.clone()).collect::<Vec<_>>();
    assert_eq!(asked(), [at(20)..at(22), at(23)..at(39), at(39)..at(40)]);
    // What is there, what is empty and what is outside cost nothing.
    layer.prefetch(at(20), at(20)).unwrap();
    layer.prefetch(at(3), 0).unwrap();
    layer.prefetch(u64::MAX - 3, 10).unwrap();
    assert_eq!(asked().len(), 3);
    layer.prefetch(at(47) + 7, u64::MAX).unwrap();
    assert_eq!(asked().last(), Some(&(at(47)..at(48) - 5)));
    settle(&cache);
    for block in (20..40).chain([47]) {
        assert!(read(&layer, at(block), 100).unwrap() == server.shared.content[block * BLOCK_LEN..][..100]);
    }
    assert_eq!(cache.stats().misses, 1);
}

#[test]
fn a_prefetch_from_a_failing_origin_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(32 * BLOCK_LEN));
    let cache = cache(dir.path(), LIMIT);
    let layer = open(&cache, &server);
    server.always(Act::Status(404, vec![]));
    let error = layer.prefetch(0, at(32)).unwrap_err().to_string();
    assert!(error.contains("404"), "{error}");
    assert_eq!(cache.stats().stored, 0);
}

#[test]
fn impossible_layers_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(dir.path(), LIMIT);
    for size in [0, u64::MAX, (1 << 40) + 1] {
        assert!(cache.open_layer(RemoteLayer::new("http://127.0.0.1:1/", size)).is_err());
    }
    for url in ["", "ftp://127.0.0.1/", "http://user:password@127.0.0.1/", "http://"] {
        let error = cache.open_layer(RemoteLayer::new(url, 10)).map(|_| ()).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("password"));
    }
}

#[test]
fn a_local_file_of_the_right_size_is_preferred() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(BLOCK_LEN));
    let cache = cache(&dir.path().join("cache"), LIMIT);
    let path = dir.path().join("layer");
    let remote =
        || RemoteLayer { path: Some(path.clone()), ..RemoteLayer::new(server.url("/layer"), BLOCK_LEN as u64) };
    std::fs::write(&path, &server.shared.content[1..]).unwrap();
    assert!(matches!(cache.open_layer(remote()).unwrap(), LayerSource::Cached(_)));
    std::fs::write(&path, &server.shared.content).unwrap();
    let before = server.seen().len();
    let layer = cache.open_layer(remote()).unwrap();
    assert!(matches!(layer, LayerSource::Local(_)));
    assert!(layer.as_file().is_some());
    assert!(read(&layer, 0, BLOCK_LEN).unwrap() == server.shared.content);
    assert_eq!(server.seen().len(), before);
}
