//! A small HTTP server on loopback that can misbehave, and a cache to point at it.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use blockd::cache::{Cache, CacheOptions, LayerSource, RemoteLayer, BLOCK};

/// What one request meets.
#[derive(Debug, Clone)]
pub enum Act {
    Good,
    /// Nothing is sent until the server ends.
    Stall,
    /// The head and so many bytes of the body, then nothing.
    StallAfter(usize),
    /// The head and so many bytes of the body, then the connection is closed.
    CutAfter(usize),
    /// Closed without an answer.
    Drop,
    Status(u16, Vec<(&'static str, String)>),
    /// 206, shifted by so many bytes.
    Shifted(u64),
    /// 200 with everything.
    Whole,
    /// 206 that claims another total.
    Total(u64),
    /// The content is another one, with another ETag.
    Changed,
    /// Content-Length is less than the range.
    ShortLength,
    Gzip,
}

#[derive(Debug, Clone)]
pub struct Seen {
    pub target: String,
    pub range: Range<u64>,
    pub headers: Vec<(String, String)>,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }
}

pub struct Shared {
    pub content: Vec<u8>,
    pub etag: Mutex<Option<String>>,
    pub script: Mutex<VecDeque<Act>>,
    pub default: Mutex<Act>,
    pub seen: Mutex<Vec<Seen>>,
    /// If set, requests without this Authorization get 401.
    pub authorization: Mutex<Option<String>>,
    /// While set, answers wait.
    held: Mutex<bool>,
    release: Condvar,
    arrived: Condvar,
    pub delay: Mutex<Duration>,
    closed: AtomicBool,
    pub connections: AtomicUsize,
}

pub struct Server {
    pub shared: Arc<Shared>,
    pub port: u16,
}

impl Server {
    pub fn new(content: Vec<u8>) -> Self {
        Self::with(content, None)
    }

    /// One that speaks TLS.
    pub fn tls(content: Vec<u8>, config: Arc<rustls::ServerConfig>) -> Self {
        Self::with(content, Some(config))
    }

    fn with(content: Vec<u8>, tls: Option<Arc<rustls::ServerConfig>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            content,
            etag: Mutex::new(Some("\"one\"".to_owned())),
            script: Mutex::default(),
            default: Mutex::new(Act::Good),
            seen: Mutex::default(),
            authorization: Mutex::default(),
            held: Mutex::new(false),
            release: Condvar::new(),
            arrived: Condvar::new(),
            delay: Mutex::default(),
            closed: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
        });
        let server = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if server.closed.load(SeqCst) {
                    return;
                }
                let (server, tls) = (server.clone(), tls.clone());
                std::thread::spawn(move || {
                    server.connections.fetch_add(1, SeqCst);
                    let _ = stream.set_nodelay(true);
                    let _ = match tls {
                        None => serve(&server, stream),
                        Some(config) => {
                            let session = rustls::ServerConnection::new(config).unwrap();
                            serve(&server, rustls::StreamOwned::new(session, stream))
                        }
                    };
                    server.connections.fetch_sub(1, SeqCst);
                });
            }
        });
        Self { shared, port }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    pub fn script(&self, acts: impl IntoIterator<Item = Act>) {
        self.shared.script.lock().unwrap().extend(acts);
    }

    pub fn always(&self, act: Act) {
        *self.shared.default.lock().unwrap() = act;
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.shared.seen.lock().unwrap().clone()
    }

    pub fn hold(&self, held: bool) {
        *self.shared.held.lock().unwrap() = held;
        self.shared.release.notify_all();
    }

    /// Waits until so many requests came.
    pub fn wait_for(&self, requests: usize) {
        let seen = self.shared.seen.lock().unwrap();
        let (seen, timeout) = self
            .shared
            .arrived
            .wait_timeout_while(seen, Duration::from_secs(30), |seen| seen.len() < requests)
            .unwrap();
        assert!(!timeout.timed_out(), "{} requests came, not {requests}", seen.len());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.closed.store(true, SeqCst);
        self.hold(false);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn serve(server: &Shared, stream: impl Read + Write) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let target = line.split(' ').nth(1).unwrap_or("").to_owned();
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            headers.push((name.to_ascii_lowercase(), value.to_owned()));
        }
        let size = server.content.len() as u64;
        let range = headers.iter().find(|(name, _)| name == "range").map(|(_, value)| {
            let (first, last) = value.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            first.parse().unwrap()..last.parse::<u64>().unwrap() + 1
        });
        let range: Range<u64> = range.unwrap_or(0..size);
        let seen = Seen { target, range: range.clone(), headers };
        let refused =
            server.authorization.lock().unwrap().as_deref().is_some_and(|a| seen.header("authorization") != Some(a));
        server.seen.lock().unwrap().push(seen);
        server.arrived.notify_all();
        let held = server.held.lock().unwrap();
        drop(server.release.wait_while(held, |held| *held && !server.closed.load(SeqCst)).unwrap());
        let delay = *server.delay.lock().unwrap();
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
        let act = if refused {
            Act::Status(401, vec![])
        } else {
            let act = server.script.lock().unwrap().pop_front();
            act.unwrap_or_else(|| server.default.lock().unwrap().clone())
        };
        if !answer(server, act, range, reader.get_mut())? {
            return Ok(());
        }
    }
}

/// Whether the connection goes on.
fn answer(server: &Shared, act: Act, range: Range<u64>, out: &mut impl Write) -> std::io::Result<bool> {
    let size = server.content.len() as u64;
    let etag = server.etag.lock().unwrap().clone();
    let etag = etag.map(|etag| format!("ETag: {etag}\r\n")).unwrap_or_default();
    let body = |range: &Range<u64>| &server.content[range.start as usize..range.end as usize];
    let head = |range: &Range<u64>, total: u64, extra: &str| {
        format!(
            "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {}-{}/{total}\r\nContent-Length: {}\r\n{extra}\r\n",
            range.start,
            range.end - 1,
            range.end - range.start,
        )
    };
    let stall = || {
        while !server.closed.load(SeqCst) {
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    match act {
        Act::Good => {
            out.write_all(head(&range, size, &etag).as_bytes())?;
            out.write_all(body(&range))?;
        }
        Act::Stall => stall(),
        Act::StallAfter(n) => {
            out.write_all(head(&range, size, &etag).as_bytes())?;
            let body = body(&range);
            out.write_all(&body[..n.min(body.len())])?;
            stall();
        }
        Act::CutAfter(n) => {
            out.write_all(head(&range, size, &etag).as_bytes())?;
            let body = body(&range);
            out.write_all(&body[..n.min(body.len())])?;
            return Ok(false);
        }
        Act::Drop => return Ok(false),
        Act::Status(status, headers) => {
            let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
            out.write_all(format!("HTTP/1.1 {status} X\r\nContent-Length: 2\r\n{headers}\r\nno").as_bytes())?;
        }
        Act::Shifted(by) => {
            let range = range.start + by..range.end + by;
            out.write_all(head(&range, size, &etag).as_bytes())?;
            out.write_all(body(&range))?;
        }
        Act::Whole => {
            out.write_all(format!("HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n{etag}\r\n").as_bytes())?;
            out.write_all(&server.content)?;
        }
        Act::Total(total) => {
            out.write_all(head(&range, total, &etag).as_bytes())?;
            out.write_all(body(&range))?;
        }
        Act::Changed => {
            out.write_all(head(&range, size, "ETag: \"two\"\r\n").as_bytes())?;
            out.write_all(&vec![0xee; (range.end - range.start) as usize])?;
        }
        Act::ShortLength => {
            let text = head(&range, size, &etag).replace(
                &format!("Content-Length: {}", range.end - range.start),
                &format!("Content-Length: {}", range.end - range.start - 1),
            );
            out.write_all(text.as_bytes())?;
            out.write_all(&body(&range)[1..])?;
        }
        Act::Gzip => {
            out.write_all(head(&range, size, "Content-Encoding: gzip\r\n").as_bytes())?;
            out.write_all(body(&range))?;
        }
    }
    Ok(true)
}

/// Content in which every 8 bytes differ.
pub fn content(len: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(len + 8);
    let mut word = 0x9e37_79b9_7f4a_7c15_u64;
    while out.len() < len {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        out.extend_from_slice(&word.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// Options that make failures quick.
pub fn options(dir: &Path, limit: u64) -> CacheOptions {
    let mut options = CacheOptions::new(dir, limit);
    options.origin.connect_timeout = Duration::from_secs(2);
    options.origin.stall_timeout = Duration::from_millis(300);
    options.origin.budget = Duration::from_secs(5);
    options.origin.attempts = 4;
    options.origin.backoff = Duration::from_millis(5);
    options.origin.backoff_max = Duration::from_millis(20);
    options.origin.refresh_timeout = Duration::from_millis(300);
    options
}

pub fn cache(dir: &Path, limit: u64) -> Cache {
    Cache::open(options(dir, limit)).unwrap()
}

/// A cache for tests in which nothing fails: on a busy machine everything may take long.
pub fn patient(dir: &Path, limit: u64) -> Cache {
    let mut options = options(dir, limit);
    options.origin.stall_timeout = Duration::from_secs(20);
    options.origin.budget = Duration::from_secs(60);
    Cache::open(options).unwrap()
}

pub fn open(cache: &Cache, server: &Server) -> LayerSource {
    cache.open_layer(RemoteLayer::new(server.url("/layer"), server.shared.content.len() as u64)).unwrap()
}

pub fn read(layer: &LayerSource, offset: u64, len: usize) -> std::io::Result<Vec<u8>> {
    use overlaybd::ByteSource;
    let mut buf = vec![0; len];
    layer.read_exact_at(&mut buf, offset)?;
    Ok(buf)
}

/// Waits until everything fetched is stored (or was not to be).
pub fn settle(cache: &Cache) {
    let end = std::time::Instant::now() + Duration::from_secs(30);
    loop {
        let stats = cache.stats();
        if stats.stored + stats.bypassed >= stats.fetched {
            return;
        }
        assert!(std::time::Instant::now() < end, "{stats:?}");
        std::thread::yield_now();
    }
}

/// Bytes a directory takes on disk.
pub fn disk_usage(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(dir).unwrap().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).map(|meta| meta.blocks() * 512).sum()
}

pub const KIB: usize = 1024;
pub const BLOCK_LEN: usize = BLOCK as usize;
