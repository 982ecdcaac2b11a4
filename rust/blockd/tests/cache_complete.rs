//! Whole layers: assembled, verified, local; or poisoned.

#![allow(clippy::unwrap_used)]

mod cache_common;

use blockd::cache::{Cache, CompleteError, LayerSource, RemoteLayer};
use cache_common::{cache, content, open, patient, read, settle, Act, Server, BLOCK_LEN};
use overlaybd::{sha256, ByteSource, Digest, MemorySource};

const SIZE: usize = 20 * BLOCK_LEN + 123;

fn with_digest(server: &Server, digest: Digest) -> RemoteLayer {
    RemoteLayer { digest: Some(digest), ..RemoteLayer::new(server.url("/layer?signature=1"), SIZE as u64) }
}

fn digest_of(server: &Server) -> Digest {
    sha256(&MemorySource::new(server.shared.content.clone())).unwrap()
}

fn remote(cache: &Cache, layer: RemoteLayer) -> LayerSource {
    let layer = cache.open_layer(layer).unwrap();
    assert!(layer.cached().is_some());
    layer
}

#[test]
fn a_complete_layer_is_published_and_read_locally() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(SIZE));
    // Less than the layer: assembling needs no more of the cache than it gets.
    let cache = cache(&dir.path().join("cache"), 8 * BLOCK_LEN as u64);
    let path = dir.path().join("layer");
    let spec = RemoteLayer { path: Some(path.clone()), ..with_digest(&server, digest_of(&server)) };
    let layer = remote(&cache, spec.clone());
    // A predecessor was killed while it assembled the layer.
    std::fs::write(dir.path().join(".layer.partial"), vec![1; SIZE + 5]).unwrap();
    read(&layer, 5, 10).unwrap();
    assert!(layer.as_file().is_none());
    let digest = layer.cached().unwrap().complete().unwrap();
    assert_eq!(digest, digest_of(&server));
    assert!(layer.cached().unwrap().is_local() && layer.cached().unwrap().is_verified());
    assert!(layer.as_file().is_some());
    assert!(std::fs::read(&path).unwrap() == server.shared.content);
    server.always(Act::Status(500, vec![]));
    assert!(read(&layer, 0, SIZE).unwrap() == server.shared.content);
    settle(&cache);
    assert_eq!(cache.stats().blocks, 0, "the bytes are kept once");
    assert!(matches!(cache.open_layer(spec).unwrap(), LayerSource::Local(_)));
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

fn eventually(what: impl Fn() -> bool) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while !what() {
        assert!(std::time::Instant::now() < end, "it never happened");
        std::thread::yield_now();
    }
}

#[test]
fn an_open_layer_is_completed_in_the_background_and_a_closed_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(SIZE));
    let cache = patient(&dir.path().join("cache"), 8 * BLOCK_LEN as u64);
    let [closed, kept] = ["closed", "kept"].map(|name| {
        let path = Some(dir.path().join(name));
        let layer = remote(&cache, RemoteLayer { path, ..with_digest(&server, digest_of(&server)) });
        read(&layer, 5, 10).unwrap();
        layer
    });
    settle(&cache);
    // It is in the middle of the first, and the second has its turn only once that was given up.
    server.hold(true);
    let before = server.seen().len();
    cache.complete_later(&closed);
    cache.complete_later(&kept);
    server.wait_for(before + 1);
    drop(closed);
    server.hold(false);
    eventually(|| kept.cached().unwrap().is_local());
    assert!(std::fs::read(dir.path().join("kept")).unwrap() == server.shared.content);
    assert!(read(&kept, 0, SIZE).unwrap() == server.shared.content);
    let mut left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["cache", "kept"]);
}

#[test]
fn the_end_of_the_cache_does_not_wait_for_a_layer_to_be_complete() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(SIZE));
    let cache = cache(&dir.path().join("cache"), 8 * BLOCK_LEN as u64);
    let path = Some(dir.path().join("layer"));
    let layer = remote(&cache, RemoteLayer { path, ..with_digest(&server, digest_of(&server)) });
    server.always(Act::Stall);
    let before = server.seen().len();
    cache.complete_later(&layer);
    server.wait_for(before + 1);
    drop(cache);
    assert!(!layer.cached().unwrap().is_local());
    assert!(!dir.path().join("layer").exists() && !dir.path().join(".layer.partial").exists());
}

#[test]
fn a_layer_without_a_path_is_verified_in_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(SIZE));
    let cache = cache(dir.path(), 64 << 20);
    let layer = remote(&cache, with_digest(&server, digest_of(&server)));
    let cached = layer.cached().unwrap();
    assert!(!cached.is_verified());
    cached.complete().unwrap();
    assert!(cached.is_verified());
    settle(&cache);
    assert_eq!(cached.progress(), (21, 21));
    server.always(Act::Status(500, vec![]));
    assert!(read(&layer, 0, SIZE).unwrap() == server.shared.content);
}

#[test]
fn a_wrong_digest_poisons_the_layer_and_only_it() {
    let dir = tempfile::tempdir().unwrap();
    let (server, good) = (Server::new(content(SIZE)), Server::new(content(SIZE)));
    let cache = cache(&dir.path().join("cache"), 64 << 20);
    let path = dir.path().join("layer");
    let declared = Digest([1; 32]);
    let spec = RemoteLayer { path: Some(path.clone()), ..with_digest(&server, declared) };
    let (layer, twin) = (remote(&cache, spec.clone()), remote(&cache, spec.clone()));
    let other = remote(&cache, with_digest(&good, digest_of(&good)));
    read(&other, 0, 100).unwrap();
    let error = layer.cached().unwrap().complete().unwrap_err();
    assert!(matches!(error, CompleteError::Digest { .. }));
    for layer in [&layer, &twin] {
        let error = read(layer, 0, 10).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
        assert!(error.to_string().contains(&format!("not the declared sha256:{declared}")), "{error}");
    }
    assert!(read(&other, 0, 100).unwrap() == good.shared.content[..100]);
    let poisoned = cache.stats().poisoned;
    assert_eq!(poisoned.len(), 1);
    assert!(poisoned[0].0.ends_with("/layer") && !path.exists());
    assert!(!dir.path().join(".layer.partial").exists());
    settle(&cache);
    assert_eq!(cache.stats().blocks, 1, "nothing of it stays");
    // Attached again, it gets another chance.
    drop((layer, twin));
    let again = remote(&cache, spec);
    assert!(read(&again, 0, 10).is_ok());
    assert!(cache.stats().poisoned.is_empty());
}

#[test]
fn a_claimed_digest_gives_no_way_into_the_layer_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let good = Server::new(content(SIZE));
    let evil = Server::new(vec![0x66; SIZE]);
    let cache = cache(dir.path(), 64 << 20);
    let digest = digest_of(&good);
    let theirs = remote(&cache, with_digest(&evil, digest));
    read(&theirs, 0, SIZE).unwrap();
    settle(&cache);
    let ours = remote(&cache, with_digest(&good, digest));
    assert!(read(&ours, 0, SIZE).unwrap() == good.shared.content);
}

#[test]
fn completing_fails_cleanly() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(SIZE));
    let cache = cache(&dir.path().join("cache"), 64 << 20);
    let spec = |path: &str| RemoteLayer {
        path: Some(dir.path().join(path)),
        ..RemoteLayer::new(server.url("/layer"), SIZE as u64)
    };
    let nowhere = remote(&cache, spec("no/such/place"));
    assert!(matches!(nowhere.cached().unwrap().complete(), Err(CompleteError::Write(..))));
    let layer = remote(&cache, spec("layer"));
    server.always(Act::Status(410, vec![]));
    assert!(matches!(layer.cached().unwrap().complete(), Err(CompleteError::Read(_))));
    assert!(!dir.path().join(".layer.partial").exists() && !dir.path().join("layer").exists());
    server.always(Act::Good);
    layer.cached().unwrap().complete().unwrap();
    assert!(read(&layer, 0, SIZE).unwrap() == server.shared.content);
    assert!(read(&open(&cache, &server), 7, 10).unwrap() == server.shared.content[7..17]);
}
