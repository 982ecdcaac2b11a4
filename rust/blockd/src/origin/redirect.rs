//! Which redirects are followed.

use http::{HeaderMap, StatusCode};
use url::Url;

use super::OriginError;

/// Redirects followed for one request.
pub(super) const MAX_HOPS: usize = 5;

/// Checks that `url` is one we can ask: absolute, HTTP or HTTPS, no credentials in it.
pub(super) fn parse(url: &str) -> Result<Url, OriginError> {
    usable(Url::parse(url).map_err(|error| OriginError::Url(error.to_string()))?)
}

fn usable(mut url: Url) -> Result<Url, OriginError> {
    let wrong = |why: &str| Err(OriginError::Url(why.to_owned()));
    if !matches!(url.scheme(), "http" | "https") {
        return wrong("only http and https are known");
    }
    if !url.username().is_empty() || url.password().is_some() {
        return wrong("credentials belong in the headers");
    }
    if url.host_str().is_none_or(str::is_empty) {
        return wrong("it names no host");
    }
    url.set_fragment(None);
    Ok(url)
}

pub(super) fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

/// Where a redirect from `from` leads.
pub(super) fn target(from: &Url, headers: &HeaderMap) -> Result<Url, OriginError> {
    let refuse = |why: &str| OriginError::Redirect(why.to_owned());
    let location = headers.get(http::header::LOCATION).ok_or_else(|| refuse("it names no location"))?;
    let location = location.to_str().map_err(|_| refuse("its location is not text"))?;
    let target = from.join(location).map_err(|_| refuse("its location is not a URL"))?;
    let target = usable(target).map_err(|error| OriginError::Redirect(error.to_string()))?;
    if from.scheme() == "https" && target.scheme() == "http" {
        return Err(refuse("it leads from https to http"));
    }
    Ok(target)
}

/// Whether headers meant for `a` may be sent to `b`.
pub(super) fn same_origin(a: &Url, b: &Url) -> bool {
    a.scheme() == b.scheme() && a.host() == b.host() && a.port_or_known_default() == b.port_or_known_default()
}

/// The URL as it may be shown: the query often is a signature.
pub(super) fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redirect(from: &str, to: &str) -> Result<String, OriginError> {
        let headers = [(http::header::LOCATION, to.parse().unwrap())].into_iter().collect();
        target(&parse(from).unwrap(), &headers).map(String::from)
    }

    #[test]
    fn redirects_resolve_and_are_bounded_in_kind() {
        assert_eq!(redirect("http://a/x/y", "z?q=1").unwrap(), "http://a/x/z?q=1");
        assert_eq!(redirect("http://a/x", "https://b/y#f").unwrap(), "https://b/y");
        for to in ["ftp://b/", "file:///etc/passwd", "http://u:p@b/", "http://[", "http://b/"] {
            assert!(redirect("https://a/x", to).is_err(), "{to}");
        }
        assert!(target(&parse("http://a/").unwrap(), &HeaderMap::new()).is_err());
    }

    #[test]
    fn headers_stay_with_scheme_host_and_port() {
        let same = |a: &str, b: &str| same_origin(&parse(a).unwrap(), &parse(b).unwrap());
        assert!(same("https://a/x", "https://A:443/y"));
        assert!(!same("https://a/", "https://a:444/"));
        assert!(!same("http://a/", "https://a/"));
        assert!(!same("https://a/", "https://b.a/"));
        assert_eq!(shown(&parse("https://a/b?sig=1").unwrap()), "https://a/b");
        assert!(parse("https://u@a/").is_err() && parse("/a").is_err() && parse("unix:/a").is_err());
    }
}
