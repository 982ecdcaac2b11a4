//! Origins that misbehave: each fault is retried or reported, and no wrong byte is ever read.

#![allow(clippy::unwrap_used)]

mod cache_common;

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockd::cache::RemoteLayer;
use blockd::origin::{Credentials, Headers, RefreshFuture};
use cache_common::{cache, content, open, options, read, settle, Act, Server, BLOCK_LEN, KIB};

const SIZE: usize = 8 * BLOCK_LEN + 1000;
const LIMIT: u64 = 64 << 20;

/// The layer reads right although the first answers were these.
fn survives(acts: Vec<Act>) -> blockd::cache::CacheStats {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(SIZE));
    let cache = cache(dir.path(), LIMIT);
    let layer = open(&cache, &server);
    server.script(acts);
    let at = 3 * BLOCK_LEN - 100;
    assert!(read(&layer, at as u64, 2 * BLOCK_LEN).unwrap() == server.shared.content[at..at + 2 * BLOCK_LEN]);
    cache.stats()
}

/// The layer cannot be read; the message says why.
fn fails(act: Act, expected: &str) {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(SIZE));
    let cache = cache(dir.path(), LIMIT);
    let layer = open(&cache, &server);
    server.always(act);
    let started = Instant::now();
    let error = read(&layer, 3 * BLOCK_LEN as u64, 100).unwrap_err();
    assert!(error.to_string().contains(expected), "{error}");
    assert!(error.to_string().contains("/layer"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(20));
    // It is not for ever.
    server.always(Act::Good);
    if !expected.contains("changed") {
        assert!(read(&layer, 3 * BLOCK_LEN as u64, 100).unwrap() == server.shared.content[3 * BLOCK_LEN..][..100]);
    }
}

#[test]
fn passing_faults_are_survived() {
    assert_eq!(survives(vec![Act::Good]).origin_retries, 0);
    assert_eq!(survives(vec![Act::CutAfter(100)]).origin_retries, 1);
    assert_eq!(survives(vec![Act::CutAfter(BLOCK_LEN + 5), Act::CutAfter(7)]).origin_retries, 2);
    assert_eq!(survives(vec![Act::StallAfter(BLOCK_LEN / 2)]).origin_retries, 1);
    assert_eq!(survives(vec![Act::Stall]).origin_retries, 1);
    assert_eq!(survives(vec![Act::Shifted(4096)]).origin_retries, 1);
    assert_eq!(survives(vec![Act::ShortLength]).origin_retries, 1);
    let burst = [500, 502, 503].map(|status| Act::Status(status, vec![]));
    assert_eq!(survives(burst.to_vec()).origin_retries, 3);
    survives(vec![Act::Drop, Act::Status(429, vec![("Retry-After", "0".to_owned())])]);
}

#[test]
fn a_broken_transfer_goes_on_where_it_broke() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(SIZE));
    let cache = cache(dir.path(), LIMIT);
    let layer = open(&cache, &server);
    server.script([Act::CutAfter(BLOCK_LEN + 10)]);
    assert!(read(&layer, 0, 3 * BLOCK_LEN).unwrap() == server.shared.content[..3 * BLOCK_LEN]);
    let ranges: Vec<_> = server.seen().iter().map(|seen| seen.range.clone()).collect();
    assert_eq!(ranges[0], 0..1, "the probe");
    assert_eq!(ranges[1].start, 0);
    assert_eq!(ranges[2].start, BLOCK_LEN as u64 + 10);
}

#[test]
fn lasting_faults_end_with_a_reason() {
    fails(Act::Status(404, vec![]), "answered 404");
    fails(Act::Status(503, vec![]), "answered 503");
    fails(Act::Status(503, vec![("Retry-After", "3600".to_owned())]), "retry after 3600s");
    fails(Act::Stall, "nothing arrived for 300ms");
    fails(Act::StallAfter(0), "nothing arrived for 300ms");
    fails(Act::CutAfter(0), "the request failed");
    fails(Act::Drop, "the request failed");
    fails(Act::Shifted(1), "bytes 786433-");
    fails(Act::ShortLength, "a body of");
    fails(Act::Total(7), "has 7 bytes at the origin, not the declared");
    fails(Act::Changed, "it was \"one\", now it is \"two\"");
    fails(Act::Gzip, "compressed");
    fails(Act::Status(401, vec![]), "refused the credentials");
    fails(Act::Status(302, vec![("Location", "/layer".to_owned())]), "more than 5");
    fails(Act::Status(302, vec![("Location", "ftp://x/".to_owned())]), "only http and https");
}

#[test]
fn a_dead_origin_is_an_error_within_the_budget() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(SIZE));
    let url = server.url("/layer");
    let cache = cache(dir.path(), LIMIT);
    drop(server);
    let started = Instant::now();
    assert!(cache.open_layer(RemoteLayer::new(url, SIZE as u64)).is_err());
    assert!(started.elapsed() < Duration::from_secs(6));
}

#[test]
fn a_trickle_is_not_progress() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(SIZE));
    let mut options = options(dir.path(), LIMIT);
    options.origin.budget = Duration::from_millis(500);
    let cache = blockd::cache::Cache::open(options).unwrap();
    let layer = open(&cache, &server);
    // Each answer brings one more byte, so no try is without progress; the pace is what ends it.
    server.always(Act::CutAfter(1));
    let error = read(&layer, 0, 10).unwrap_err();
    assert!(error.to_string().contains("request failed") || error.to_string().contains("not done within"), "{error}");
}

#[test]
fn an_origin_that_ignores_ranges_is_read_whole_once() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(SIZE));
    let cache = cache(dir.path(), LIMIT);
    server.always(Act::Whole);
    let layer = open(&cache, &server);
    let before = server.seen().len();
    assert!(read(&layer, 5 * BLOCK_LEN as u64, 100).unwrap() == server.shared.content[5 * BLOCK_LEN..][..100]);
    assert!(read(&layer, 0, SIZE).unwrap() == server.shared.content);
    assert!(read(&layer, 0, SIZE).unwrap() == server.shared.content);
    assert_eq!(server.seen().len() - before, 1, "one answer fills everything");
}

#[test]
fn a_redirect_is_followed_without_the_callers_headers() {
    let dir = tempfile::tempdir().unwrap();
    let (front, store) = (Server::new(content(SIZE)), Server::new(content(SIZE)));
    let location = store.url("/blob?signature=abc");
    front.always(Act::Status(307, vec![("Location", location)]));
    let cache = cache(dir.path(), LIMIT);
    let mut layer = RemoteLayer::new(front.url("/layer"), SIZE as u64);
    layer.headers = Headers::new([("Authorization", "Bearer secret"), ("X-Token", "secret")]).unwrap();
    let layer = cache.open_layer(layer).unwrap();
    for block in [0, 3, 5] {
        read(&layer, (block * BLOCK_LEN) as u64, 10).unwrap();
    }
    assert_eq!(front.seen().len(), 1, "the end of the redirect is remembered");
    assert_eq!(front.seen()[0].header("authorization"), Some("Bearer secret"));
    assert_eq!(store.seen().len(), 4);
    for seen in store.seen() {
        assert_eq!(seen.target, "/blob?signature=abc");
        assert!(!seen.headers.iter().any(|(_, value)| value.contains("secret")), "{seen:?}");
    }
    // A signature that expired: the front is asked again.
    store.script([Act::Status(403, vec![])]);
    read(&layer, 7 * BLOCK_LEN as u64, 10).unwrap();
    assert_eq!(front.seen().len(), 2);
}

struct Renew {
    token: &'static str,
    asked: Arc<AtomicUsize>,
    hang: bool,
}

impl Credentials for Renew {
    fn refresh(&self, url: &str) -> RefreshFuture {
        assert!(url.ends_with("/layer?x=1"));
        self.asked.fetch_add(1, SeqCst);
        let (token, hang) = (self.token, self.hang);
        Box::pin(async move {
            if hang {
                std::future::pending::<()>().await;
            }
            Headers::new([("Authorization", token)]).map_err(|error| error.to_string())
        })
    }
}

fn guarded(
    server: &Server,
    cache: &blockd::cache::Cache,
    token: &'static str,
    hang: bool,
) -> (Arc<AtomicUsize>, Result<blockd::cache::LayerSource, String>) {
    *server.shared.authorization.lock().unwrap() = Some("new".to_owned());
    let asked = Arc::new(AtomicUsize::new(0));
    let mut layer = RemoteLayer::new(server.url("/layer?x=1"), SIZE as u64);
    layer.digest = Some(overlaybd::sha256(&overlaybd::MemorySource::new(server.shared.content.clone())).unwrap());
    layer.headers = Headers::new([("Authorization", "old")]).unwrap();
    layer.credentials = Arc::new(Renew { token, asked: asked.clone(), hang });
    (asked, cache.open_layer(layer).map_err(|error| error.to_string()))
}

#[test]
fn expired_credentials_are_renewed_once_for_all_readers() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(SIZE));
    let cache = cache(dir.path(), LIMIT);
    let (asked, layer) = guarded(&server, &cache, "new", false);
    let layer = layer.unwrap();
    server.hold(true);
    std::thread::scope(|scope| {
        for block in [0, 2, 4, 6] {
            let (layer, content) = (&layer, &server.shared.content);
            scope.spawn(move || {
                let at = block * BLOCK_LEN;
                assert!(read(layer, at as u64, 100).unwrap() == content[at..at + 100]);
            });
        }
        server.wait_for(4);
        server.hold(false);
    });
    assert_eq!(asked.load(SeqCst), 1);
    assert_eq!(cache.stats().origin_refreshes, 1);
}

#[test]
fn credentials_that_do_not_come_or_do_not_help_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(SIZE));
    let cache = cache(dir.path(), LIMIT);
    let (asked, layer) = guarded(&server, &cache, "wrong", false);
    let error = read(&layer.unwrap(), 0, 10).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    assert!(error.to_string().contains("refused the credentials (401)"), "{error}");
    assert!(!error.to_string().contains("x=1"), "queries are secret: {error}");
    assert_eq!(asked.load(SeqCst), 2);
    let (_, layer) = guarded(&server, &cache, "new", true);
    let layer = layer.unwrap();
    let error = read(&layer, 0, 10).unwrap_err();
    assert!(error.to_string().contains("no answer within 300ms"), "{error}");
    // Headers pushed from outside help, too.
    assert_eq!(cache.set_headers(&server.url("/"), &Headers::new([("authorization", "new")]).unwrap()), 1);
    assert!(read(&layer, 0, 10).unwrap() == server.shared.content[..10]);
}

#[test]
fn a_failed_block_is_not_stored_and_a_good_neighbour_is() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(content(SIZE));
    let cache = cache(dir.path(), LIMIT);
    let layer = open(&cache, &server);
    server.script([Act::CutAfter(BLOCK_LEN + 64 * KIB)]);
    server.always(Act::Status(404, vec![]));
    assert!(read(&layer, 0, 2 * BLOCK_LEN).is_err());
    settle(&cache);
    let before = server.seen().len();
    assert!(read(&layer, 0, BLOCK_LEN).unwrap() == server.shared.content[..BLOCK_LEN]);
    assert_eq!(server.seen().len(), before);
    assert_eq!(cache.stats().blocks, 1);
}
