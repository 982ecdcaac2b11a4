//! The daemon is killed, or the disk fills, at any moment.

#![allow(clippy::unwrap_used)]

mod cache_common;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use blockd::cache::RemoteLayer;
use cache_common::{cache, content, disk_usage, open, read, settle, Server, BLOCK_LEN};

const BLOCKS: usize = 48;
const SIZE: usize = BLOCKS * BLOCK_LEN + 321;
const SMALL: usize = 2 * BLOCK_LEN + 99;
const LIMIT: u64 = 16 * BLOCK_LEN as u64;
const CHILD: &str = "BLOCKD_TEST_CACHE_CHILD";

/// The victim: fills a cache from several threads and says a word after each read. Does nothing when run as a test.
#[test]
fn child() {
    let Ok(arguments) = std::env::var(CHILD) else { return };
    let [dir, url, small] = arguments.split(' ').collect::<Vec<_>>()[..] else { panic!("{arguments}") };
    let cache = cache(Path::new(dir), LIMIT);
    let layer = cache.open_layer(RemoteLayer::new(url, SIZE as u64)).unwrap();
    // Meanwhile a small one is completed, beside the cache.
    let path = Some(Path::new(dir).with_extension("whole"));
    let small = RemoteLayer { path, ..RemoteLayer::new(small, SMALL as u64) };
    let completed = cache.open_layer(small).unwrap();
    cache.complete_later(&completed);
    let expected = content(SIZE);
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let (layer, expected) = (&layer, &expected);
            scope.spawn(move || {
                // Bounded: the parent kills long before.
                for step in 0..20_000_usize {
                    let block = (step * (7 + 2 * thread) + thread * 11) % BLOCKS;
                    let from = block * BLOCK_LEN + step % 4096;
                    assert!(read(layer, from as u64, 5000).unwrap() == expected[from..from + 5000]);
                    println!("read");
                }
            });
        }
    });
}

#[test]
fn after_kill_9_only_whole_blocks_are_served_and_the_bound_holds() {
    let files = tempfile::tempdir().unwrap();
    let (dir, whole) = (files.path().join("cache"), files.path().join("cache.whole"));
    let server = Server::new(content(SIZE));
    let small = Server::new(content(SMALL));
    let (mut kept, mut completed) = (0, 0);
    for round in 0..40_usize {
        let arguments = format!("{} {} {}", dir.display(), server.url("/layer"), small.url("/small"));
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(CHILD, arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Killed after a number of reads that differs each time, while fetches, stores and evictions are under way.
        let reads = 1 + round * 37 % 101;
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(lines.map_while(Result::ok).filter(|line| line.contains("read")).take(reads).count(), reads);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(disk_usage(&dir) <= LIMIT, "round {round}: {} bytes on disk", disk_usage(&dir));
        if let Ok(bytes) = std::fs::read(&whole) {
            assert!(bytes == small.shared.content, "round {round}: {} bytes", bytes.len());
            std::fs::remove_file(&whole).unwrap();
            completed += 1;
        }
        if round % 4 == 3 {
            let cache = cache(&dir, LIMIT);
            let layer = open(&cache, &server);
            kept += cache.stats().blocks;
            for block in 0..BLOCKS {
                let from = block * BLOCK_LEN;
                assert!(read(&layer, from as u64, BLOCK_LEN).unwrap() == server.shared.content[from..from + BLOCK_LEN]);
            }
            settle(&cache);
            let stats = cache.stats();
            assert_eq!(stats.damaged, 0, "round {round}: {stats:?}");
            assert!(stats.used_bytes <= LIMIT && disk_usage(&dir) <= LIMIT, "{stats:?}");
        }
    }
    assert!(kept > 0, "blocks outlive the kill");
    assert!(completed > 0, "some were completed before the kill");
    let mut left: Vec<_> = std::fs::read_dir(files.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.retain(|name| name != "cache" && name != ".cache.whole.partial");
    assert!(left.is_empty(), "{left:?}");
}

/// A small file system of its own, gone with its owner.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn new(size: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let option = format!("size={size}");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &option, "none"]).arg(dir.path()).status().unwrap();
        assert!(mounted.success(), "mounting a tmpfs needs root");
        Self(dir)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_means_reading_from_the_origin() {
    let tmpfs = Tmpfs::new("3m");
    let server = Server::new(content(SIZE));
    let cache = cache(&tmpfs.0.path().join("cache"), 64 << 20);
    let layer = open(&cache, &server);
    assert!(read(&layer, 0, SIZE).unwrap() == server.shared.content);
    settle(&cache);
    let stats = cache.stats();
    assert!(stats.stored > 0 && stats.blocks <= 12, "{stats:?}");
    // Others fill the rest: nothing can be stored, everything can be read, new layers can be opened.
    let _ = std::fs::write(tmpfs.0.path().join("filler"), vec![1; 4 << 20]);
    let other = Server::new(content(SIZE));
    let second = open(&cache, &other);
    assert!(read(&second, 0, SIZE).unwrap() == other.shared.content);
    assert!(read(&layer, 0, SIZE).unwrap() == server.shared.content);
    settle(&cache);
    assert!(cache.stats().bypassed > 0);
}
