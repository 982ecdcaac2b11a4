//! Content codings of downloads (RFC 9110 §12.5.3).

/// How a download is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// As it is.
    Identity,
    /// Compressed.
    Gzip,
}

/// Picks a coding for an `Accept-Encoding` header; `None` when neither is acceptable.
///
/// Gzip is used for those who ask for nothing else, as the SDKs do with `gzip=True`, and for those who refuse identity. HTTP
/// clients that list all they can decode by default (`gzip, deflate, …`) get the bytes as they are: to the host next door,
/// compressing costs more than it saves, and the length would be unknown.
pub fn choose(header: Option<&str>) -> Option<Coding> {
    let accepted: Vec<(String, f32)> = header.unwrap_or("").split(',').filter_map(item).collect();
    let weight = |names: &[&str]| accepted.iter().find(|(name, _)| names.contains(&name.as_str())).map(|&(_, q)| q);
    let (explicit_gzip, explicit_identity, any) = (weight(&["gzip", "x-gzip"]), weight(&["identity"]), weight(&["*"]));
    let gzip = explicit_gzip.or(any).unwrap_or(0.0);
    // Identity is acceptable unless excluded by name or by `*;q=0`.
    let identity = explicit_identity.or(any).unwrap_or(f32::MIN_POSITIVE);
    let only_gzip = explicit_gzip.is_some()
        && accepted.iter().all(|(name, q)| *q == 0.0 || matches!(name.as_str(), "gzip" | "x-gzip" | "identity"));
    match (gzip > 0.0, identity > 0.0) {
        (true, false) => Some(Coding::Gzip),
        (true, true) if only_gzip && gzip >= identity => Some(Coding::Gzip),
        (_, true) => Some(Coding::Identity),
        (false, false) => None,
    }
}

/// Name in lower case and weight of one list item; a malformed weight counts as 1.
fn item(text: &str) -> Option<(String, f32)> {
    let mut fields = text.split(';').map(str::trim);
    let name = fields.next().filter(|name| !name.is_empty())?.to_ascii_lowercase();
    let weight = fields.find_map(|field| field.strip_prefix("q=").or_else(|| field.strip_prefix("Q=")));
    Some((name, weight.and_then(|weight| weight.parse().ok()).unwrap_or(1.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_for_those_who_ask_for_it() {
        for header in
            ["gzip", "GZIP", "x-gzip", "gzip;q=0.5", "gzip, identity;q=0.5", "br;q=0, gzip", "identity;q=0, *"]
        {
            assert_eq!(choose(Some(header)), Some(Coding::Gzip), "{header}");
        }
    }

    #[test]
    fn identity_for_all_others() {
        let headers = [
            "",
            "identity",
            "gzip, deflate",
            "gzip, deflate, br, zstd",
            "*",
            "deflate",
            "gzip;q=0",
            "gzip;q=0.1, identity",
        ];
        for header in headers {
            assert_eq!(choose(Some(header)), Some(Coding::Identity), "{header}");
        }
        assert_eq!(choose(None), Some(Coding::Identity));
    }

    #[test]
    fn nothing_acceptable() {
        for header in ["identity;q=0", "*;q=0", "br, identity;q=0", "br, *;q=0", "gzip;q=0, *;q=0"] {
            assert_eq!(choose(Some(header)), None, "{header}");
        }
    }
}
