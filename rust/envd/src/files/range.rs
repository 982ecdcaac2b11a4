//! The `Range` header of a download (RFC 9110 §14).

/// What a request asks for, of `total` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Everything: no header, one that cannot be understood, or several ranges, which a server may ignore.
    All,
    /// From byte `start`, `length` > 0 bytes.
    Part {
        /// Offset of the first byte.
        start: u64,
        /// Number of bytes.
        length: u64,
    },
    /// A range that begins behind the end: 416.
    Unsatisfiable,
}

/// Reads a `Range` header.
pub fn parse(header: &str, total: u64) -> Wanted {
    part(header, total).unwrap_or(Wanted::All)
}

/// `None` when the header is not one well-formed byte range.
fn part(header: &str, total: u64) -> Option<Wanted> {
    let (unit, spec) = header.split_once('=')?;
    if !unit.trim().eq_ignore_ascii_case("bytes") {
        return None;
    }
    let (first, last) = spec.trim().split_once('-')?;
    let start = match (first, last) {
        ("", suffix) => total - number(suffix)?.min(total),
        (first, _) => number(first)?,
    };
    let end = match (first, last) {
        ("", _) | (_, "") => total,
        (_, last) => number(last).filter(|&last| last >= start)?.saturating_add(1).min(total),
    };
    if start >= end {
        return Some(Wanted::Unsatisfiable);
    }
    Some(Wanted::Part { start, length: end - start })
}

/// Digits only; a number too large for the type is as good as the largest.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(start: u64, length: u64) -> Wanted {
        Wanted::Part { start, length }
    }

    #[test]
    fn one_range() {
        let cases = [
            ("bytes=0-0", bytes(0, 1)),
            ("bytes=2-4", bytes(2, 3)),
            ("BYTES = 2-4", bytes(2, 3)),
            ("bytes=2-", bytes(2, 8)),
            ("bytes=2-99", bytes(2, 8)),
            ("bytes=2-99999999999999999999999", bytes(2, 8)),
            ("bytes=2-18446744073709551615", bytes(2, 8)),
            ("bytes=-3", bytes(7, 3)),
            ("bytes=-99", bytes(0, 10)),
            ("bytes=9-", bytes(9, 1)),
        ];
        for (header, expected) in cases {
            assert_eq!(parse(header, 10), expected, "{header}");
        }
    }

    #[test]
    fn behind_the_end() {
        for header in ["bytes=10-", "bytes=10-12", "bytes=99999999999999999999999-", "bytes=-0"] {
            assert_eq!(parse(header, 10), Wanted::Unsatisfiable, "{header}");
        }
        assert_eq!(parse("bytes=0-", 0), Wanted::Unsatisfiable);
        assert_eq!(parse("bytes=-5", 0), Wanted::Unsatisfiable);
    }

    #[test]
    fn what_is_ignored() {
        for header in
            ["", "bytes", "bytes=", "bytes=-", "bytes=4-2", "bytes=a-b", "bytes=+1-2", "lines=1-2", "bytes=0-1,3-4"]
        {
            assert_eq!(parse(header, 10), Wanted::All, "{header}");
        }
    }
}
