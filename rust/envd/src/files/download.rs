//! `GET` and `HEAD /files`.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use flate2::write::GzEncoder;
use flate2::Compression;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use tokio::sync::mpsc;

use super::encoding::{self, Coding};
use super::range::{self, Wanted};
use super::{disposition, open};
use crate::error::HttpError;
use crate::filesystem;
use crate::filesystem::error::FsError;
use crate::filesystem::time::http_date;
use crate::http::{channel, empty, full, Body, Response};

/// Bytes read at a time.
const CHUNK: usize = 256 << 10;

/// A file and what is known of its content.
struct Source {
    content: Content,
    /// Seconds of unix time.
    modified: i64,
}

/// The size the kernel reports is a promise only for some files: those of /proc say 0 and those of /sys a page. So the
/// beginning is read first; only a file that is longer is taken at its word.
enum Content {
    /// All of it.
    Whole(Bytes),
    /// A file of so many bytes.
    Sized(File, u64),
    /// Its beginning, and a file of unknown length with the rest.
    Unsized(Bytes, File),
}

/// Sends the file at `path`.
///
/// # Errors
/// 400 for what is no regular file, 404; 406 when the client accepts neither gzip nor identity.
pub async fn download(request: &Parts, path: &Path) -> Result<Response, HttpError> {
    let headers = &request.headers;
    let coding = encoding::choose(joined(headers, header::ACCEPT_ENCODING).as_deref()).ok_or_else(|| {
        HttpError::new(
            StatusCode::NOT_ACCEPTABLE,
            "no acceptable content encoding; 'identity' and 'gzip' are available",
        )
    })?;
    let opened = path.to_path_buf();
    let Source { content, modified } = filesystem::blocking(move || source(&opened)).await?;

    let mut response = match (content, coding) {
        // Nothing to compress.
        (Content::Whole(bytes), _) if bytes.is_empty() => with_length(full(bytes), 0),
        (content, Coding::Gzip) if !headers.contains_key(header::RANGE) => compressed(content),
        (Content::Unsized(start, file), _) => Response::new(stream(Some(start), file, None)),
        (content, _) => ranged(content, headers, modified)?,
    };
    let fields = response.headers_mut();
    let mut set = |name: HeaderName, value: &str| {
        if let Ok(value) = HeaderValue::from_str(value) {
            fields.insert(name, value);
        }
    };
    set(header::LAST_MODIFIED, &http_date(modified));
    set(header::VARY, "Accept-Encoding");
    set(header::CONTENT_DISPOSITION, &disposition::inline(path));
    set(header::CONTENT_TYPE, disposition::content_type(path));
    if request.method == Method::HEAD {
        // Dropping the body ends its reader.
        *response.body_mut() = full(Bytes::new());
    }
    Ok(response)
}

fn source(path: &Path) -> Result<Source, FsError> {
    let (mut file, metadata) = open::read(path)?;
    let failed = |error: io::Error| FsError::io("read", path, &error);
    // One byte more than the size shows the end of an honest file. Size 0 may be the lie of a file of /proc.
    let size = metadata.len();
    let limit = match usize::try_from(size) {
        Ok(1..CHUNK) => size as usize + 1,
        _ => CHUNK + 1,
    };
    let start = read_up_to(&mut file, limit).map_err(failed)?;
    let content = if start.len() < limit {
        Content::Whole(start)
    } else if size >= start.len() as u64 {
        file.seek(SeekFrom::Start(0)).map_err(failed)?;
        Content::Sized(file, size)
    } else {
        Content::Unsized(start, file)
    };
    Ok(Source { content, modified: metadata.mtime() })
}

/// Reads until there are `limit` bytes or the file ends. A file that would make us wait (/proc/kmsg) ends there.
fn read_up_to(file: &mut File, limit: usize) -> io::Result<Bytes> {
    let mut buffer = vec![0; limit];
    let mut filled = 0;
    while filled < limit {
        match file.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    buffer.truncate(filled);
    Ok(buffer.into())
}

/// All of the content or the part that is asked for, with its length.
fn ranged(content: Content, headers: &HeaderMap, modified: i64) -> Result<Response, HttpError> {
    let total = match &content {
        Content::Whole(bytes) => bytes.len() as u64,
        Content::Sized(_, size) => *size,
        Content::Unsized(..) => return Err(HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, "length unknown")),
    };
    let wanted = match headers.get(header::RANGE).and_then(|value| value.to_str().ok()) {
        Some(header) if still_current(headers, modified) => range::parse(header, total),
        _ => Wanted::All,
    };
    let (start, length) = match wanted {
        Wanted::All => (0, total),
        Wanted::Part { start, length } => (start, length),
        Wanted::Unsatisfiable => {
            let mut response = empty(StatusCode::RANGE_NOT_SATISFIABLE);
            insert(response.headers_mut(), header::CONTENT_RANGE, &format!("bytes */{total}"));
            return Ok(response);
        }
    };
    let body = match content {
        Content::Sized(mut file, _) => {
            let failed = |error| HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot seek: {error}"));
            file.seek(SeekFrom::Start(start)).map_err(failed)?;
            stream(None, file, Some(length))
        }
        Content::Whole(bytes) | Content::Unsized(bytes, _) => {
            // Inside `total`, which is the length of a buffer.
            full(bytes.slice(start as usize..(start + length) as usize))
        }
    };
    let mut response = with_length(body, length);
    insert(response.headers_mut(), header::ACCEPT_RANGES, "bytes");
    if wanted != Wanted::All {
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        let value = format!("bytes {start}-{}/{total}", start + length - 1);
        insert(response.headers_mut(), header::CONTENT_RANGE, &value);
    }
    Ok(response)
}

/// Whether an `If-Range` condition, if there is one, holds. A date identifies a version only if the file was not modified within
/// the second of that date, which is certain once the second is over (RFC 9110 §8.8.2.2).
fn still_current(headers: &HeaderMap, modified: i64) -> bool {
    let Some(condition) = headers.get(header::IF_RANGE) else { return true };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
    condition.as_bytes() == http_date(modified).as_bytes() && now > modified
}

fn with_length(body: Body, length: u64) -> Response {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    response
}

fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

/// All values of a header that is a list.
fn joined(headers: &HeaderMap, name: HeaderName) -> Option<String> {
    let values: Vec<&str> = headers.get_all(name).iter().filter_map(|value| value.to_str().ok()).collect();
    (!values.is_empty()).then(|| values.join(","))
}

/// A body that is `start` and then what the file has: exactly `length` bytes, or up to its end. A file that turns out shorter
/// tears the connection, so that the client does not take a part for the whole.
fn stream(start: Option<Bytes>, file: File, length: Option<u64>) -> Body {
    let (sender, body) = channel(1);
    tokio::spawn(async move {
        if let Some(start) = start {
            if sender.send(Ok(start)).await.is_err() {
                return;
            }
        }
        if let Err(error) = copy(file, length, &sender).await {
            let _ = sender.send(Err(error)).await;
        }
    });
    body
}

/// # Errors
/// What reading fails with; `UnexpectedEof` when the file is shorter than `length`. A client that has gone is no error.
async fn copy(file: File, length: Option<u64>, sender: &mpsc::Sender<io::Result<Bytes>>) -> io::Result<()> {
    let mut file = Some(file);
    let mut left = length.unwrap_or(u64::MAX);
    while let (Some(mut current), true) = (file.take(), left > 0) {
        // Wait for the client first: what is not read yet takes no memory.
        let Ok(permit) = sender.reserve().await else { return Ok(()) };
        let limit = usize::try_from(left).map_or(CHUNK, |left| left.min(CHUNK));
        let (current, bytes) = blocking(move || read_up_to(&mut current, limit).map(|bytes| (current, bytes))).await?;
        left -= bytes.len() as u64;
        if bytes.len() == limit {
            file = Some(current);
        } else if length.is_some() && left > 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter"));
        }
        if !bytes.is_empty() {
            permit.send(Ok(bytes));
        }
    }
    Ok(())
}

/// The content as gzip, of unknown length.
fn compressed(content: Content) -> Response {
    let (sender, body) = channel(1);
    let (start, file) = match content {
        Content::Whole(bytes) => (bytes, None),
        Content::Sized(file, _) => (Bytes::new(), Some(file)),
        Content::Unsized(bytes, file) => (bytes, Some(file)),
    };
    tokio::spawn(async move {
        if let Err(error) = compress(start, file, &sender).await {
            let _ = sender.send(Err(error)).await;
        }
    });
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    response
}

async fn compress(start: Bytes, file: Option<File>, sender: &mpsc::Sender<io::Result<Bytes>>) -> io::Result<()> {
    // The fastest level: the guest's CPU is scarcer than the bytes between it and the host.
    let encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let mut state = Some((encoder, file, start));
    while let Some((mut encoder, mut file, bytes)) = state.take() {
        let Ok(permit) = sender.reserve().await else { return Ok(()) };
        let (next, packed) = blocking(move || {
            encoder.write_all(&bytes)?;
            let more = match &mut file {
                Some(file) => read_up_to(file, CHUNK)?,
                None => Bytes::new(),
            };
            if more.is_empty() {
                return Ok((None, encoder.finish()?));
            }
            let packed = std::mem::take(encoder.get_mut());
            Ok((Some((encoder, file, more)), packed))
        })
        .await?;
        state = next;
        if !packed.is_empty() {
            permit.send(Ok(packed.into()));
        }
    }
    Ok(())
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}
