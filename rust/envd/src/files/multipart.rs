//! `multipart/form-data` bodies (RFC 7578), read as they arrive.
//!
//! Never holds more than one read of the connection and one delimiter: a part may be of any size. Names and file names are kept
//! exactly as sent: here a file name is a full path, which general-purpose parsers cut to its last component.

use bytes::{Buf, Bytes, BytesMut};
use hyper::StatusCode;

use super::body::{BodyReader, Pieces};
use crate::error::HttpError;
use crate::http::RequestBody;

/// Longest boundary (RFC 2046 §5.1.1).
const MAX_BOUNDARY: usize = 70;
/// Longest header block of a part: a path may have 4095 bytes, and every one of them may be escaped.
const MAX_PART_HEAD: usize = 32 << 10;
/// What stands after a percent sign in a quoted value, and for what.
const ENCODED: [(&str, char); 3] = [("22", '"'), ("0D", '\r'), ("0A", '\n')];
/// Most headers of a part; clients send two or three.
const MAX_PART_HEADERS: usize = 16;

/// What the headers of a part say.
#[derive(Debug, PartialEq, Eq)]
pub struct Part {
    /// Form field.
    pub name: String,
    /// `None` for a field that is no file.
    pub filename: Option<String>,
}

/// Reads the parts of one body in order.
pub struct Multipart<'a, B> {
    source: &'a mut BodyReader<B>,
    /// CR LF, two dashes, the boundary. The first one of a body may lack its CR LF, hence the buffer starts with them.
    delimiter: Vec<u8>,
    buffer: BytesMut,
    ended: bool,
}

impl<'a, B> Multipart<'a, B>
where
    B: hyper::body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: std::fmt::Display,
{
    /// # Errors
    /// 400 when the content type has no valid boundary.
    pub fn new(content_type: &str, source: &'a mut BodyReader<B>) -> Result<Self, HttpError> {
        let boundary = parameters(content_type).find(|(name, _)| name == "boundary").map(|(_, value)| value);
        let boundary = boundary.filter(|boundary| (1..=MAX_BOUNDARY).contains(&boundary.len())).ok_or_else(|| {
            bad(format!("content type '{content_type}' has no boundary of 1 to {MAX_BOUNDARY} characters"))
        })?;
        let delimiter = [b"\r\n--", boundary.as_bytes()].concat();
        Ok(Self { source, delimiter, buffer: BytesMut::from(&b"\r\n"[..]), ended: false })
    }

    /// The next part, or `None` after the last one. What was not read of the part before is skipped.
    ///
    /// # Errors
    /// 400 when the body is malformed or ends early.
    pub async fn next_part(&mut self) -> Result<Option<Part>, HttpError> {
        if self.ended {
            return Ok(None);
        }
        while self.chunk().await?.is_some() {}
        self.buffer.advance(self.delimiter.len());
        // Two dashes end the body; otherwise blanks and a line end follow.
        while self.buffer.len() < 2 {
            self.fill().await?;
        }
        if self.buffer.starts_with(b"--") {
            self.ended = true;
            return Ok(None);
        }
        let line = self.take_until(b"\r\n").await?;
        if !line.iter().all(|byte| matches!(byte, b' ' | b'\t')) {
            return Err(bad("malformed multipart body: text after a boundary"));
        }
        // A part without headers starts with the empty line.
        self.buffer = [&b"\r\n"[..], &self.buffer].concat().as_slice().into();
        let head = self.take_until(b"\r\n\r\n").await?;
        part(&head).map(Some)
    }

    /// More data of the current part, or `None` at its end.
    ///
    /// # Errors
    /// 400 when the body ends early.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, HttpError> {
        loop {
            if let Some(at) = find(&self.buffer, &self.delimiter) {
                return Ok((at > 0).then(|| self.buffer.split_to(at).freeze()));
            }
            // The last bytes may be the beginning of a delimiter.
            let certain = self.buffer.len().saturating_sub(self.delimiter.len() - 1);
            if certain > 0 {
                return Ok(Some(self.buffer.split_to(certain).freeze()));
            }
            self.fill().await?;
        }
    }

    async fn take_until(&mut self, mark: &[u8]) -> Result<Bytes, HttpError> {
        loop {
            if let Some(at) = find(&self.buffer, mark) {
                let taken = self.buffer.split_to(at).freeze();
                self.buffer.advance(mark.len());
                return Ok(taken);
            }
            if self.buffer.len() > MAX_PART_HEAD {
                return Err(bad(format!("headers of a multipart part exceed {MAX_PART_HEAD} bytes")));
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> Result<(), HttpError> {
        match self.source.next().await? {
            Some(bytes) => self.buffer.extend_from_slice(&bytes),
            None => return Err(bad("multipart body ends before its closing boundary")),
        }
        Ok(())
    }
}

/// The data of the current part.
impl Pieces for &mut Multipart<'_, RequestBody> {
    async fn piece(&mut self) -> Result<Option<Bytes>, HttpError> {
        self.chunk().await
    }
}

fn part(head: &[u8]) -> Result<Part, HttpError> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_PART_HEADERS];
    let complete = [head.strip_prefix(b"\r\n").unwrap_or(head), b"\r\n\r\n"].concat();
    let headers = match httparse::parse_headers(&complete, &mut headers) {
        Ok(httparse::Status::Complete((_, headers))) => headers,
        Ok(httparse::Status::Partial) => return Err(bad("malformed headers of a multipart part: incomplete")),
        Err(error) => return Err(bad(format!("malformed headers of a multipart part: {error}"))),
    };
    let disposition = headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-disposition"));
    let disposition = disposition.map(|header| String::from_utf8_lossy(header.value)).unwrap_or_default();
    let value = |wanted: &str| parameters(&disposition).find(|(name, _)| name == wanted).map(|(_, value)| value);
    match value("name") {
        Some(name) => Ok(Part { name, filename: value("filename") }),
        None => Err(bad("a multipart part has no Content-Disposition with a name")),
    }
}

/// The `; name=value` parameters of a header, names in lower case. See [`unquote`] for quoted values.
fn parameters(header: &str) -> impl Iterator<Item = (String, String)> + '_ {
    let mut rest = header.split_once(';').map_or("", |(_, rest)| rest);
    std::iter::from_fn(move || loop {
        let (name, after) = rest.split_once('=')?;
        // A parameter without a value, before one that has it.
        if let Some((_, later)) = name.split_once(';') {
            rest = &rest[rest.len() - later.len() - 1 - after.len()..];
            continue;
        }
        let name = name.trim().to_ascii_lowercase();
        let after = after.trim_start();
        let (value, after) = match after.strip_prefix('"') {
            Some(quoted) => unquote(quoted),
            None => {
                let end = after.find(';').unwrap_or(after.len());
                (after[..end].trim_end().to_owned(), &after[end..])
            }
        };
        rest = after.split_once(';').map_or("", |(_, rest)| rest);
        return Some((name, value));
    })
}

/// The text up to the closing quote, and what follows it. A backslash escapes only a quote or another backslash: browsers and
/// JavaScript do not escape a backslash of a file name, httpx does. A quote and line ends come percent-encoded, and nothing else
/// (HTML, "multipart/form-data encoding algorithm"); httpx does so too.
fn unquote(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (value, &text[at + 1..]),
            '\\' => match chars.next_if(|(_, next)| matches!(next, '"' | '\\')) {
                Some((_, escaped)) => value.push(escaped),
                None => value.push('\\'),
            },
            '%' => match ENCODED.iter().find(|(code, _)| text[at + 1..].starts_with(code)) {
                Some(&(code, encoded)) => {
                    value.push(encoded);
                    chars.nth(code.len() - 1);
                }
                None => value.push('%'),
            },
            _ => value.push(c),
        }
    }
    (value, "")
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    memchr::memmem::find(haystack, needle)
}

fn bad(message: impl Into<String>) -> HttpError {
    HttpError::new(StatusCode::BAD_REQUEST, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{channel, Body};

    const TYPE: &str = "multipart/form-data; boundary=XX";

    /// A reader of `body` that arrives `step` bytes at a time.
    fn reader(body: &[u8], step: usize) -> BodyReader<Body> {
        let chunks: Vec<Bytes> = body.chunks(step.max(1)).map(Bytes::copy_from_slice).collect();
        let (sender, streamed) = channel(chunks.len().max(1));
        for chunk in chunks {
            sender.try_send(Ok(chunk)).unwrap();
        }
        BodyReader::new(streamed)
    }

    async fn all(body: &[u8], step: usize) -> Result<Vec<(Part, Vec<u8>)>, HttpError> {
        let mut source = reader(body, step);
        let mut multipart = Multipart::new(TYPE, &mut source)?;
        let mut parts = Vec::new();
        while let Some(part) = multipart.next_part().await? {
            let mut data = Vec::new();
            while let Some(chunk) = multipart.chunk().await? {
                data.extend_from_slice(&chunk);
            }
            parts.push((part, data));
        }
        Ok(parts)
    }

    fn part(name: &str, filename: Option<&str>) -> Part {
        Part { name: name.into(), filename: filename.map(Into::into) }
    }

    #[tokio::test]
    async fn parts_of_every_shape_in_chunks_of_every_size() {
        let body = b"preamble\r\n--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"/a/b c\"\r\n\
            Content-Type: text/plain\r\n\r\none\r\n--X\r\n-two\r\n--XX \t\r\ncontent-disposition: form-data; name=file; \
            filename=x\r\n\r\n\r\n--XX\r\nContent-Disposition: form-data; name=\"other\"\r\n\r\n3\r\n--XX--\r\nepilogue";
        for step in 1..body.len() {
            let parts = all(body, step).await.unwrap();
            let expected = [
                (part("file", Some("/a/b c")), b"one\r\n--X\r\n-two".to_vec()),
                (part("file", Some("x")), Vec::new()),
                (part("other", None), b"3".to_vec()),
            ];
            assert_eq!(parts, expected, "in chunks of {step}");
        }
    }

    #[tokio::test]
    async fn parts_that_are_not_read_are_skipped() {
        let body = b"--XX\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--XX\r\nContent-Disposition: form-data; name=b\r\n\r\n2\r\n--XX--";
        let mut source = reader(body, 7);
        let mut multipart = Multipart::new(TYPE, &mut source).unwrap();
        assert_eq!(multipart.next_part().await.unwrap(), Some(part("a", None)));
        assert_eq!(multipart.next_part().await.unwrap(), Some(part("b", None)));
        assert_eq!(multipart.next_part().await.unwrap(), None);
        assert_eq!(multipart.next_part().await.unwrap(), None);
    }

    #[tokio::test]
    async fn malformed_bodies() {
        let long = [b"--XX\r\nA: ", vec![b'x'; 40 << 10].as_slice(), b"\r\n\r\n\r\n--XX--"].concat();
        let cases: [&[u8]; 7] = [
            b"",
            b"--XX",
            b"--XX\r\nContent-Disposition: form-data; name=a\r\n\r\ndata",
            b"--XX\r\nContent-Disposition: form-data\r\n\r\ndata\r\n--XX--",
            b"--XX\r\n\r\ndata\r\n--XX--",
            b"--XXjunk\r\n\r\ndata\r\n--XX--",
            &long,
        ];
        for body in cases {
            let error = all(body, 1000).await.unwrap_err();
            assert_eq!(
                error.status,
                StatusCode::BAD_REQUEST,
                "{}",
                String::from_utf8_lossy(&body[..body.len().min(80)])
            );
        }
    }

    #[test]
    fn parameters_keep_paths_as_they_are() {
        let filename = |header: &str| parameters(header).find(|(name, _)| name == "filename").map(|(_, value)| value);
        let cases = [
            (r#"form-data; name="file"; filename="/y/z.txt""#, "/y/z.txt"),
            (r#"form-data; FileName="a;b=c \"q\" d\\e \f"; name=file"#, r#"a;b=c "q" d\e \f"#),
            (r#"form-data; flag; filename=plain ; name=x"#, "plain"),
            (r#"form-data; filename="ünï %22%0D%0A %25 %0a 5%""#, "ünï \"\r\n %25 %0a 5%"),
            (r#"form-data; filename=%22"#, "%22"),
            (r#"form-data; filename="unclosed"#, "unclosed"),
            (r#"form-data; filename="""#, ""),
        ];
        for (header, expected) in cases {
            assert_eq!(filename(header).as_deref(), Some(expected), "{header}");
        }
        assert_eq!(filename("form-data; name=x"), None);
    }

    #[test]
    fn boundaries() {
        let new = |content_type: &str| {
            Multipart::new(content_type, &mut BodyReader::new(channel(1).1)).map(|multipart| multipart.delimiter)
        };
        assert_eq!(new("multipart/form-data; boundary=\"a b\"").unwrap(), b"\r\n--a b");
        assert!(new("multipart/form-data").is_err());
        assert!(new("multipart/form-data; boundary=").is_err());
        assert!(new(&format!("multipart/form-data; boundary={}", "x".repeat(71))).is_err());
    }
}
