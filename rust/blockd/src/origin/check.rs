//! Is a response what was asked for?

use std::ops::Range;

use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, LAST_MODIFIED};
use http::{HeaderMap, HeaderName, StatusCode};

use super::OriginError;

/// Largest object read whole from an origin that ignores ranges.
const MAX_WHOLE: u64 = 256 << 20;

/// What tells one version of an object from another.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Validator {
    etag: Option<String>,
    modified: Option<String>,
}

impl Validator {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        Self { etag: text(headers, ETAG), modified: text(headers, LAST_MODIFIED) }
    }

    /// Whether there is nothing to compare.
    pub fn is_empty(&self) -> bool {
        self.etag.is_none() && self.modified.is_none()
    }

    /// Both as text, for telling versions apart on disk.
    pub fn identity(&self) -> String {
        format!("{}\n{}", self.etag.as_deref().unwrap_or(""), self.modified.as_deref().unwrap_or(""))
    }

    /// The entity tag decides where both have one; otherwise the date does.
    fn agrees(&self, other: &Self) -> bool {
        match (&self.etag, &other.etag) {
            (Some(a), Some(b)) => a == b,
            _ => match (&self.modified, &other.modified) {
                (Some(a), Some(b)) => a == b,
                _ => true,
            },
        }
    }
}

impl std::fmt::Display for Validator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.etag.as_deref().or(self.modified.as_deref()).unwrap_or("unknown"))
    }
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<String> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// Compares a success response (`200` or `206`) with what was asked for; the result is the range its body holds.
pub(super) fn check(
    status: StatusCode,
    headers: &HeaderMap,
    asked: &Range<u64>,
    size: u64,
    pinned: &Validator,
) -> Result<Range<u64>, OriginError> {
    if let Some(encoding) = text(headers, CONTENT_ENCODING).filter(|e| !e.eq_ignore_ascii_case("identity")) {
        return Err(OriginError::Encoded(encoding));
    }
    let found = Validator::of(headers);
    if !pinned.agrees(&found) {
        return Err(OriginError::Changed { was: pinned.to_string(), is: found.to_string() });
    }
    let length = text(headers, CONTENT_LENGTH).map(|v| v.parse::<u64>()).transpose();
    let length = length.map_err(|_| OriginError::WrongRange("an unreadable Content-Length".to_owned()))?;
    let body = if status == StatusCode::PARTIAL_CONTENT {
        let header = text(headers, CONTENT_RANGE).unwrap_or_default();
        let Some((range, total)) = parse_content_range(&header) else {
            return Err(OriginError::WrongRange(format!("Content-Range {header:?}")));
        };
        if let Some(total) = total.filter(|total| *total != size) {
            return Err(OriginError::WrongSize { declared: size, found: total });
        }
        if range != *asked {
            return Err(OriginError::WrongRange(format!("bytes {}-{}", range.start, range.end - 1)));
        }
        range
    } else {
        match length {
            Some(found) if found != size => return Err(OriginError::WrongSize { declared: size, found }),
            _ if *asked != (0..size) && size > MAX_WHOLE => return Err(OriginError::IgnoresRanges(size)),
            _ => 0..size,
        }
    };
    match length {
        Some(length) if length != body.end - body.start => {
            Err(OriginError::WrongRange(format!("a body of {length} bytes")))
        }
        _ => Ok(body),
    }
}

/// `bytes FIRST-LAST/TOTAL` or `bytes FIRST-LAST/*` (RFC 9110, 14.4).
fn parse_content_range(header: &str) -> Option<(Range<u64>, Option<u64>)> {
    let (range, total) = header.strip_prefix("bytes ")?.trim().split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last) = (first.parse::<u64>().ok()?, last.parse::<u64>().ok()?);
    let total = if total == "*" { None } else { Some(total.parse().ok()?) };
    let end = last.checked_add(1).filter(|end| first < *end)?;
    Some((first..end, total))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).collect()
    }

    fn partial(pairs: &[(&'static str, &str)]) -> Result<Range<u64>, OriginError> {
        check(StatusCode::PARTIAL_CONTENT, &headers(pairs), &(10..20), 100, &Validator::default())
    }

    #[test]
    fn only_the_exact_range_of_the_declared_object_passes() {
        assert_eq!(partial(&[("content-range", "bytes 10-19/100"), ("content-length", "10")]).unwrap(), 10..20);
        assert_eq!(partial(&[("content-range", "bytes 10-19/*")]).unwrap(), 10..20);
        for wrong in
            ["bytes 10-18/100", "bytes 0-9/100", "bytes 19-10/100", "bytes 10-/100", "10-19/100", "", "bytes */100"]
        {
            assert!(matches!(partial(&[("content-range", wrong)]), Err(OriginError::WrongRange(_))), "{wrong}");
        }
        let absurd = format!("bytes 10-{}/100", u64::MAX);
        assert!(matches!(partial(&[("content-range", &absurd)]), Err(OriginError::WrongRange(_))));
        let grown = partial(&[("content-range", "bytes 10-19/101")]);
        assert!(matches!(grown, Err(OriginError::WrongSize { declared: 100, found: 101 })));
        let body = partial(&[("content-range", "bytes 10-19/100"), ("content-length", "9")]);
        assert!(matches!(body, Err(OriginError::WrongRange(_))));
        let encoded = partial(&[("content-range", "bytes 10-19/100"), ("content-encoding", "gzip")]);
        assert!(matches!(encoded, Err(OriginError::Encoded(_))));
    }

    #[test]
    fn a_whole_object_is_taken_if_it_is_not_too_large() {
        let none = Validator::default();
        let whole = |size: u64, length: &str| {
            check(StatusCode::OK, &headers(&[("content-length", length)]), &(10..20), size, &none)
        };
        assert_eq!(whole(100, "100").unwrap(), 0..100);
        assert!(matches!(whole(100, "10"), Err(OriginError::WrongSize { .. })));
        let size = MAX_WHOLE + 1;
        assert!(matches!(whole(size, &size.to_string()), Err(OriginError::IgnoresRanges(_))));
    }

    #[test]
    fn validators_are_compared_where_both_sides_have_one() {
        let of = |pairs: &[(&'static str, &str)]| Validator::of(&headers(pairs));
        let a = of(&[("etag", "\"a\""), ("last-modified", "Mon")]);
        assert!(a.agrees(&of(&[("etag", "\"a\""), ("last-modified", "Tue")])));
        assert!(!a.agrees(&of(&[("etag", "\"b\""), ("last-modified", "Mon")])));
        assert!(!a.agrees(&of(&[("last-modified", "Tue")])));
        assert!(a.agrees(&of(&[])));
        assert!(of(&[]).is_empty());
    }
}
